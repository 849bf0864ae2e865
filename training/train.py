"""Train a model with `hf-vaswani train --config RECIPE` or `accelerate launch -m training.train --config RECIPE`."""

import logging
import sys

from .options import Parser
from .running import naming_resumption, run
from .trainer.command_line import TrainParser, UsageError, parse_values


def make_parser() -> TrainParser:
    """Build the argument parser of `hf-vaswani train`."""
    return TrainParser()


def how_to_continue(output_dir: str) -> str:
    """Sentence that names `--resume`, if there is a checkpoint to resume."""
    from .trainer.checkpoints import complete_checkpoints

    checkpoints = complete_checkpoints(output_dir)
    return f"The same command with --resume continues from {checkpoints[-1].name}." if checkpoints else ""


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani train`."""
    try:
        values = parse_values(argv)
    except UsageError as error:
        Parser.error(make_parser(), str(error))

    from .trainer.arguments import make_arguments
    from .trainer.closing import closing_lines
    from .trainer.run import train

    model_args, data, args = make_arguments(values)
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if args.process_index == 0 else logging.WARNING,
    )
    with naming_resumption(lambda: how_to_continue(args.output_dir)):
        trainer = train(model_args, data, args)
    if args.process_index == 0:
        print("\n".join(closing_lines(trainer, data)))


if __name__ == "__main__":
    sys.exit(run("train"))
