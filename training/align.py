"""Align each word of a translation with a source word, by the model's attention or by erasure."""

import argparse
import logging
import sys

from .data.readers import read_parallel
from .evaluation.alignment_error import read_gold_links, score_alignments
from .inference.choices import METHODS
from .options import Parser, add_dtype, add_trust, positive
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani align`."""
    parser = Parser(prog="hf-vaswani align", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--sources", required=True, help="text file with one sentence per line, plain or .gz")
    parser.add_argument("--translations", required=True, help="file of translations, parallel to --sources")
    parser.add_argument(
        "--references",
        metavar="FILE",
        help="gold alignments, one line per pair, as 0-0 1-2 2?1 (? for a possible link); their precision, recall and "
        "alignment error rate are printed on stderr",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="attention",
        help="shift: attention at the position where the word is the decoder's input; naive: where it is the "
        "decoder's output; attention: the better of the two; erasure: the source word without which the word becomes "
        "least likely, slower (default: %(default)s)",
    )
    parser.add_argument(
        "--layer",
        type=positive,
        help="decoder layer, counted from 1 (default: the layer and head that agree most with erasure)",
    )
    parser.add_argument(
        "--head", type=positive, help="head of --layer, counted from 1 (default: the mean of its heads)"
    )
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="tokens per batch (default: %(default)s)")
    add_dtype(parser)
    add_trust(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani align`."""
    args = make_parser().parse_args(argv)
    translations, groups = read_parallel(args.translations, [args.sources])
    sources = [group[0] for group in groups]
    gold = read_gold_links(args.references, sources, translations) if args.references else None

    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from .inference import alignment
    from .inference.loading import load_checkpoint

    model, tokenizer = load_checkpoint(args.model, args.dtype, trust_remote_code=args.trust_remote_code)
    logging.basicConfig(format="%(message)s")
    alignment.logger.setLevel(logging.INFO)
    bar = {"total": len(sources), "unit": " pairs", "desc": "Aligning", "disable": None, "delay": 0}  # terminals only
    with logging_redirect_tqdm(), tqdm(**bar) as progress:
        options = (args.layer, args.head, args.method, args.batch_tokens, progress)
        results = alignment.align(model, tokenizer, sources, translations, *options)
    for links in results:
        print(*(f"{source}-{target}" for source, target in links))
    sys.stdout.flush()
    if gold is not None:
        print(score_alignments(results, gold), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run("align"))
