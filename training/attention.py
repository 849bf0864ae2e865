"""Show the attention weights over a sentence and its translation, in any layer and head, as a picture or as an HTML
page."""

import argparse
import sys
from pathlib import Path

from .files import PICTURES, check_output, write_whole
from .inference.choices import TITLES
from .options import Parser, add_trust, positive
from .running import run


def head_number(text: str) -> int | str:
    """Parse a head: a number from 1, "mean" or "all"."""
    return text if text in ("mean", "all") else positive(text)


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani attention`."""
    parser = Parser(prog="hf-vaswani attention", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--source", required=True, help="source sentence")
    parser.add_argument("--target", help="translation of the sentence (default: the model's own)")
    parser.add_argument(
        "--output", required=True, help="file to write: a page (.html) or a picture (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--kind",
        choices=TITLES,
        default="cross",
        help="kind of attention to draw, or to show first in a page (default: %(default)s)",
    )
    parser.add_argument("--layer", type=positive, help="layer, counted from 1 (default: the last)")
    parser.add_argument(
        "--head",
        type=head_number,
        default="mean",
        help="head, counted from 1, or mean, or all for a grid in a picture (default: %(default)s)",
    )
    add_trust(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani attention`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    output = Path(args.output)
    if output.suffix not in (".html", *PICTURES):
        parser.error(f"--output {output}: must end in .html, {', '.join(PICTURES)}")
    check_output(output, [args.model])

    from .inference.attention_maps import attention_maps, attention_page, draw_attention
    from .inference.loading import load_checkpoint

    checkpoint = load_checkpoint(args.model, trust_remote_code=args.trust_remote_code)
    attention = attention_maps(*checkpoint, args.source, args.target)
    if output.suffix == ".html":
        page = attention_page(attention, args.kind, args.layer, args.head)
        write_whole(output, page)
    else:
        draw_attention(attention, args.output, args.kind, args.layer, args.head)
    print(output)


if __name__ == "__main__":
    sys.exit(run("attention"))
