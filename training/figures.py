"""Draw the paper's figures from the code of this package: position encodings, learning rate, label smoothing, cost of
attention and, with a model, heads that do something visible. A page says which lines of the code each one shows."""

import argparse
import sys
from pathlib import Path

from .files import check_output_folder, folder_written_whole
from .options import Parser, add_trust
from .running import run


TEXT = "A man in a blue shirt is playing the guitar while two children sing."


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani figures`."""
    parser = Parser(prog="hf-vaswani figures", description=__doc__)
    parser.add_argument(
        "--output", required=True, help="folder to write, with index.html and pictures: a new or an empty one"
    )
    parser.add_argument("--model", help="checkpoint folder or Hub repository, for the attention heads (default: none)")
    parser.add_argument("--text", help=f"with --model: source sentence for the attention heads (default: {TEXT})")
    add_trust(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani figures`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.text is not None and args.model is None:
        parser.error("--text: needs --model, whose attention over the text is drawn")
    check_output_folder(args.output)
    output = Path(args.output)
    with folder_written_whole(output) as partial:
        from .publishing.figure_page import write_figures
        from .publishing.figures import figures_of_the_paper

        figures = figures_of_the_paper()
        if args.model is not None:
            from .inference.loading import load_checkpoint
            from .publishing.head_figures import heads_figure

            checkpoint = load_checkpoint(args.model, trust_remote_code=args.trust_remote_code)
            figures.append(heads_figure(*checkpoint, TEXT if args.text is None else args.text))
        files = write_figures(figures, partial)
    for file in files:
        print(output / file)


if __name__ == "__main__":
    sys.exit(run("figures"))
