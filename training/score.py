"""Score translations with BLEU, chrF, TER, the paper's compound-split BLEU, perplexity and COMET; and trees.

Every score carries its signature. --metrics selects the metrics, --bootstrap adds confidence intervals, and --baseline
tests differences from other systems for significance. --by-length and --examples show where a system is good or bad.
"""

import argparse
import sys

from .evaluation.choices import BRACKETING, COMET_MODEL, DEFAULT_METRICS, LANGUAGES, METRICS, TOKENIZERS
from .files import check_output
from .options import Parser, add_dtype, add_trust, positive
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani score`."""
    parser = Parser(prog="hf-vaswani score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = parser.add_argument_group("input", "Text files have one sentence per line, and are plain or .gz.")
    files.add_argument("--hypotheses", help="file of translations to score")
    files.add_argument(
        "--model",
        help="checkpoint whose perplexity to report; without --hypotheses, it also translates the sources; with "
        "--metrics bracketing, it parses them, and no perplexity is reported",
    )
    references = files.add_mutually_exclusive_group(required=True)
    references.add_argument("--references", nargs="+", help="one or more files of reference translations")
    references.add_argument(
        "--test-set", help="test set of sacreBLEU with sources and references, such as wmt14/en-de"
    )
    files.add_argument("--output", help="file to write the translations or trees of --model to")
    files.add_argument(
        "--sources",
        help="file of sources, or of .trees whose words to parse, for --model, --comet, --by-length and --examples",
    )
    files.add_argument(
        "--baseline", nargs="+", default=[], help="files of translations by other systems to compare with"
    )

    metrics = parser.add_argument_group("metrics")
    names = ", ".join(DEFAULT_METRICS)
    metrics.add_argument(
        "--metrics",
        nargs="+",
        choices=(*METRICS, BRACKETING),
        default=DEFAULT_METRICS,
        help=f"metrics to report (default: {names})",
    )
    metrics.add_argument(
        "--tokenize", nargs="+", choices=TOKENIZERS, help="sacreBLEU tokenisation of BLEU, one or more (default: 13a)"
    )
    metrics.add_argument(
        "--tokenized",
        action="store_true",
        help="report tokenised BLEU of text that is already tokenised; it is not comparable with sacreBLEU",
    )
    metrics.add_argument("--lowercase", action="store_true", help="ignore case, which TER always does")
    metrics.add_argument(
        "--language",
        choices=LANGUAGES,
        help="language whose rules split text into words for compound-bleu (default: that of the test set, or de)",
    )
    metrics.add_argument(
        "--comet",
        nargs="?",
        const=COMET_MODEL,
        help="report COMET, computed by this COMET model (%(const)s if no model is given)",
    )
    metrics.add_argument(
        "--comet-program", default="comet-score", help="path of the program of unbabel-comet (default: %(default)s)"
    )

    _add_analysis(parser)
    other = parser.add_argument_group("other")
    add_trust(other)
    output = other.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--markdown", action="store_true", help="print Markdown")
    other.add_argument("--batch-tokens", type=positive, default=4096, help="tokens per batch (default: %(default)s)")
    add_dtype(other)
    return parser


def _add_analysis(parser: argparse.ArgumentParser) -> None:
    """Add the options for confidence intervals, significance tests, buckets and examples."""
    analysis = parser.add_argument_group(
        "confidence and analysis",
        "Two equal scores have p = 1, where sacreBLEU would report a significant difference.",
    )
    analysis.add_argument(
        "--bootstrap",
        type=positive,
        nargs="?",
        const=1000,
        default=0,
        help="report 95%% confidence intervals from this number of bootstrap resamples (%(const)s if no number is "
        "given)",
    )
    analysis.add_argument(
        "--paired-bootstrap",
        type=positive,
        default=1000,
        help="number of resamples of the paired bootstrap test against --baseline (default: %(default)s)",
    )
    analysis.add_argument(
        "--paired-randomization",
        type=positive,
        default=10_000,
        help="number of trials of the paired approximate randomisation test against --baseline (default: %(default)s)",
    )
    analysis.add_argument(
        "--seed",
        type=positive,
        help="random seed of the intervals and tests (default: the environment variable SACREBLEU_SEED, or 12345)",
    )
    analysis.add_argument(
        "--by-length",
        type=positive,
        nargs="*",
        help="report scores by length of the source, or of the reference without sources; optional bounds in words "
        "(10 20 30 40 50 if none are given)",
    )
    analysis.add_argument("--examples", type=positive, help="number of worst and of best sentences to show")
    analysis.add_argument(
        "--examples-by",
        choices=("bleu", "chrf"),
        default="chrf",
        help="sentence score that ranks the --examples (default: %(default)s)",
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message if options conflict."""
    if not (args.hypotheses or args.model):
        parser.error("give --hypotheses, or a --model that translates")
    for name in ("model", "comet"):
        if vars(args)[name] and not (args.sources or args.test_set):
            parser.error(f"--{name} needs --sources")
    if args.output is not None and args.hypotheses:
        parser.error(f"--output {args.output}: needs a --model that translates, instead of --hypotheses")
    if args.tokenized and args.comet:
        parser.error("--comet takes raw text, not --tokenized")
    if args.tokenized and args.tokenize:
        parser.error("--tokenized already means --tokenize none: give only one of them")
    if args.by_length and sorted(set(args.by_length)) != args.by_length:
        parser.error(f"--by-length: bounds must increase, got {' '.join(map(str, args.by_length))}")
    if BRACKETING in args.metrics and len(args.references or []) != 1:
        parser.error(f"--metrics {BRACKETING} needs --references with one file of trees, one tree a line")
    if BRACKETING in args.metrics and args.model and args.hypotheses:
        parser.error(
            f"--metrics {BRACKETING} has no perplexity: give --hypotheses, or a --model that parses --sources"
        )
    if args.bootstrap == 1:
        parser.error("--bootstrap needs at least 2 resamples, got 1")


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani score`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    if args.output is not None:
        check_output(args.output, [args.model, args.sources, *(args.references or []), *args.baseline])

    from .evaluation.metrics import seeded
    from .evaluation.report import as_json, as_text
    from .evaluation.scoring import evaluate_files

    with seeded(args.seed):
        report = evaluate_files(args)
    print(as_json(report) if args.json else as_text(report, args.markdown))


if __name__ == "__main__":
    sys.exit(run("score"))
