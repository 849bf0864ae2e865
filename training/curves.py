"""Draw the loss, learning rate, and BLEU or F1 of a run against the step, from the log of the Trainer."""

import argparse
import sys
from pathlib import Path

from .files import PICTURES, check_output
from .options import Parser
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani curves`."""
    parser = Parser(prog="hf-vaswani curves", description=__doc__)
    parser.add_argument("--run", required=True, help="folder of a finished run or of one of its checkpoints")
    parser.add_argument("--output", required=True, help="picture to write: .png, .svg or .pdf")
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani curves`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if Path(args.output).suffix not in ("", *PICTURES):
        parser.error(f"--output {args.output}: must end in {', '.join(PICTURES)}")
    check_output(args.output, [Path(args.run) / "trainer_state.json"])

    from .publishing.curves import draw_curves

    draw_curves(args.run, args.output)
    print(args.output)


if __name__ == "__main__":
    sys.exit(run("curves"))
