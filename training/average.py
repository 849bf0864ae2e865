"""Average the weights of several checkpoints into one checkpoint (section 6.1 of the paper)."""

import argparse
import sys
from pathlib import Path

from .files import check_output_folder
from .options import Parser, add_trust, positive
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani average`."""
    parser = Parser(prog="hf-vaswani average", description=__doc__)
    selection = parser.add_mutually_exclusive_group(required=True)
    selection.add_argument("--run", help="folder of a run whose last checkpoints to average")
    selection.add_argument("--checkpoints", nargs="+", help="checkpoint folders to average")
    parser.add_argument(
        "--last",
        type=positive,
        default=5,
        help="number of checkpoints of --run to average; the paper averages 5, and 20 for big (default: %(default)s)",
    )
    parser.add_argument("--output", required=True, help="checkpoint folder to write")
    add_trust(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani average`."""
    args = make_parser().parse_args(argv)
    check_output_folder(args.output)

    from .trainer.averaging import average, last_checkpoints

    checkpoints = args.checkpoints
    if args.run:
        checkpoints = last_checkpoints(args.run, args.last)
    average(checkpoints, args.output, trust_remote_code=args.trust_remote_code)
    print(f"{args.output}: mean of " + ", ".join(Path(folder).name for folder in checkpoints))


if __name__ == "__main__":
    sys.exit(run("average"))
