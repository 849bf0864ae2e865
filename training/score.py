"""Score translations: BLEU, chrF, TER, the paper's compound-split BLEU, perplexity and COMET, each with its signature.

--metrics says which figures; --bootstrap, how sure they are; --baseline, whether a difference is chance; --by-length
and --examples, what they hide.
"""

import argparse
from pathlib import Path

from sacrebleu.metrics.base import Metric
from tqdm import tqdm

from .evaluation.comet import DEFAULT_MODEL, comet, find_comet
from .evaluation.compound_split import LANGUAGES
from .evaluation.metrics import (
    DEFAULT_METRICS,
    METRICS,
    TOKENIZERS,
    MetricScore,
    build_metrics,
    by_length,
    compare,
    examples,
    measure,
    seeded,
)
from .evaluation.report import Report, as_json, as_text
from .evaluation.test_sets import Texts, named_test_set, read_texts, target_language
from .files import check_output, write_whole
from .inference.loading import DTYPES, load_checkpoint
from .inference.translation import translate
from .options import add_trust, positive


LENGTH_BOUNDS = [10, 20, 30, 40, 50]


def evaluate_files(args: argparse.Namespace) -> Report:
    """Everything that the options of `hf-vaswani score` ask for.

    Raises:
        DataError: Files that are broken, not parallel, or have empty references; the message names file and line.
        OSError: A file, a model, a test set or COMET cannot be had.
        ValueError: Compound-split BLEU does not know the language of the test set.
    """
    # Before the work, lest it be in vain: metrics that there are, and COMET.
    metrics = _metrics(args, warn=True)
    if args.comet:
        find_comet(args.comet_program)
    texts, extra = _read(args), []
    if args.model:
        extra += _use_model(args, texts)
    if args.comet:
        extra.append(comet(texts, args.comet, args.comet_program, args.bootstrap))
    hypotheses, references = texts.hypotheses, texts.references
    report = Report(
        system=(args.hypotheses or args.model) + (f" on {args.test_set}" if args.test_set else ""),
        sentences=len(hypotheses),
        empty=sum(not text.strip() for text in hypotheses),
        figures=measure(metrics, hypotheses, references, args.bootstrap) + extra,
    )
    samples = {"bootstrap": args.paired_bootstrap, "randomization": args.paired_randomization}
    for baseline in texts.baselines:
        report.comparisons += compare(_metrics(args), hypotheses, baseline, references, samples)
    if args.by_length is not None:
        report.length_of = "sources" if texts.sources else "first references"
        lengths = [len(text.split()) for text in texts.sources or references[0]]
        report.buckets = by_length(_metrics(args), hypotheses, references, lengths, args.by_length or LENGTH_BOUNDS)
    if args.examples:
        report.examples_by = {"bleu": "sentence BLEU", "chrf": "chrF"}[args.examples_by]
        report.worst, report.best = examples(hypotheses, references, args.examples, args.examples_by, texts.sources)
    return report


def _read(args: argparse.Namespace) -> Texts:
    sources, references = args.sources, args.references
    if args.test_set:
        known, references = named_test_set(args.test_set)
        sources = sources or known
    return read_texts(args.hypotheses, references, sources, args.baseline)


def _use_model(args: argparse.Namespace, texts: Texts) -> list[MetricScore]:
    """The model's perplexity of the references; it also translates unless there are translations."""
    from .evaluation.perplexity import perplexities  # score_pairs, which it needs, imports this module

    model, tokenizer = load_checkpoint(args.model, args.dtype, trust_remote_code=args.trust_remote_code)
    if texts.hypotheses is None:
        with tqdm(total=len(texts.sources), unit=" sentences", desc="Translating") as progress:
            translations = translate(model, tokenizer, texts.sources, args.batch_tokens, progress)
        texts.hypotheses = [text.replace("\n", " ") for text in translations]
        if args.output:  # at once: what comes after may fail
            write_whole(Path(args.output), "".join(f"{text}\n" for text in texts.hypotheses))
    options = {"n_bootstrap": args.bootstrap, "batch_tokens": args.batch_tokens, "name": args.model}
    return perplexities(model, tokenizer, texts.sources, texts.references, **options)


def _metrics(args: argparse.Namespace, warn: bool = False) -> dict[str, Metric]:
    """The metrics, anew for each use: sacreBLEU's remember the intervals that they were used for."""
    tokenize = ("none",) if args.tokenized else tuple(args.tokenize or [None])
    target = target_language(args.test_set) if args.test_set else ""
    language = None if args.tokenized else args.language or target or "de"
    return build_metrics(tuple(args.metrics), tokenize, args.lowercase, language, target, warn)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-vaswani score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = parser.add_argument_group("what is scored (text files, a sentence a line, plain or .gz)")
    files.add_argument("--hypotheses", help="translations")
    files.add_argument("--model", help="checkpoint: its perplexity; it translates --sources without --hypotheses")
    references = files.add_mutually_exclusive_group(required=True)
    references.add_argument("--references", nargs="+", help="one or more files of references")
    references.add_argument("--test-set", help="sources and references that sacreBLEU knows, as in wmt14/en-de")
    files.add_argument("--output", help="where to write the translations that the model makes")
    files.add_argument("--sources", help="sources, for --model, --comet, --by-length and --examples")
    files.add_argument("--baseline", nargs="+", default=[], help="translations by other systems, to test against")

    figures = parser.add_argument_group("figures")
    names = ", ".join(DEFAULT_METRICS)
    figures.add_argument("--metrics", nargs="+", choices=METRICS, default=DEFAULT_METRICS, help=f"({names})")
    figures.add_argument("--tokenize", nargs="+", choices=TOKENIZERS, help="sacreBLEU tokenisation (13a)")
    figures.add_argument(
        "--tokenized",
        action="store_true",
        help="the text is already tokenised: report tokenised BLEU, which is not comparable with sacreBLEU",
    )
    figures.add_argument("--lowercase", action="store_true", help="ignore case (TER always does)")
    figures.add_argument("--language", choices=LANGUAGES, help="of compound-bleu's words (the test set's, or de)")
    figures.add_argument("--comet", nargs="?", const=DEFAULT_MODEL, help="COMET, by this model (%(const)s)")
    figures.add_argument("--comet-program", default="comet-score", help="where unbabel-comet is (%(default)s)")

    _add_trust(parser)
    other = parser.add_argument_group("other")
    add_trust(other)
    output = other.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--markdown", action="store_true", help="print Markdown")
    other.add_argument("--batch-tokens", type=positive, default=4096, help="tokens of a batch (%(default)s)")
    other.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    return parser


def _add_trust(parser: argparse.ArgumentParser) -> None:
    trust = parser.add_argument_group(
        "how far to trust them", "Where two scores are equal, p is 1; sacreBLEU itself would call that significant."
    )
    trust.add_argument(
        "--bootstrap", type=positive, nargs="?", const=1000, default=0, help="95%% intervals (%(const)s resamples)"
    )
    trust.add_argument("--paired-bootstrap", type=positive, default=1000, help="resamples (%(default)s)")
    trust.add_argument("--paired-randomization", type=positive, default=10_000, help="trials (%(default)s)")
    trust.add_argument("--seed", type=positive, help="of all of these (SACREBLEU_SEED, or 12345)")
    trust.add_argument("--by-length", type=positive, nargs="*", help="scores by length; bounds in words (10 ... 50)")
    trust.add_argument("--examples", type=positive, help="so many worst and best sentences")
    trust.add_argument("--examples-by", choices=("bleu", "chrf"), default="chrf", help="(%(default)s)")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with a message about options that do not go together."""
    if not (args.hypotheses or args.model):
        parser.error("give --hypotheses, or a --model that makes them")
    for name in ("model", "comet"):
        if vars(args)[name] and not (args.sources or args.test_set):
            parser.error(f"--{name} needs --sources")
    if args.output is not None and args.hypotheses:
        parser.error(f"--output {args.output}: no model translates")
    if args.tokenized and args.comet:
        parser.error("--comet takes raw text, not --tokenized")
    if args.tokenized and args.tokenize:
        parser.error("--tokenized is --tokenize none: give one of them")
    if args.by_length and sorted(set(args.by_length)) != args.by_length:
        parser.error(f"--by-length: bounds must rise, got {' '.join(map(str, args.by_length))}")
    if args.bootstrap == 1:
        parser.error("--bootstrap needs at least 2 resamples")


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani score`."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    if args.output is not None:
        check_output(args.output, [args.model, args.sources, *(args.references or []), *args.baseline])
    with seeded(args.seed):
        report = evaluate_files(args)
    print(as_json(report) if args.json else as_text(report, args.markdown))


if __name__ == "__main__":
    main()
