"""See attention: what the tokens of a sentence and its translation attend to, in any layer and head, as a picture or
as a page for the browser."""

import argparse
from pathlib import Path

from .files import PICTURES, check_output, write_whole
from .inference.attention_maps import TITLES, attention_maps, attention_page, draw_attention
from .inference.loading import load_checkpoint
from .options import add_trust, positive


def head_number(text: str) -> int | str:
    """A head, for argparse: a number, "mean" or "all"."""
    return text if text in ("mean", "all") else positive(text)


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani attention`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani attention", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--source", required=True, help="a sentence")
    parser.add_argument("--target", help="its translation (the model's own)")
    parser.add_argument("--output", required=True, help="file to write: .html, a page, or a picture: .png, .svg, .pdf")
    parser.add_argument(
        "--kind", choices=TITLES, default="cross", help="attention to draw, or to show first (%(default)s)"
    )
    parser.add_argument("--layer", type=positive, help="layer, from 1 (the last)")
    parser.add_argument(
        "--head", type=head_number, default="mean", help="head, from 1; mean, or all in a grid (%(default)s)"
    )
    add_trust(parser)
    args = parser.parse_args(argv)
    output = Path(args.output)
    if output.suffix not in (".html", *PICTURES):
        parser.error(f"--output {output}: must end in .html, {', '.join(PICTURES)}")
    check_output(output, [args.model])
    checkpoint = load_checkpoint(args.model, trust_remote_code=args.trust_remote_code)
    attention = attention_maps(*checkpoint, args.source, args.target)
    if output.suffix == ".html":
        page = attention_page(attention, args.kind, args.layer, args.head)
        write_whole(output, page)
    else:
        draw_attention(attention, args.output, args.kind, args.layer, args.head)
    print(output)


if __name__ == "__main__":
    main()
