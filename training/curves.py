"""Draw a run: loss, learning rate and BLEU against the step, from the Trainer's own log."""

import argparse

from .publishing.curves import draw_curves


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani curves`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani curves", description=__doc__)
    parser.add_argument("--run", required=True, help="folder of a finished run, or one of its checkpoints")
    parser.add_argument("--output", required=True, help="picture to write: .png, .svg or .pdf")
    args = parser.parse_args(argv)
    draw_curves(args.run, args.output)
    print(args.output)


if __name__ == "__main__":
    main()
