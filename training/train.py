"""Train a model with `hf-vaswani train --config RECIPE` or `accelerate launch -m training.train --config RECIPE`."""

import logging


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani train`."""
    from .trainer.arguments import parse_arguments
    from .trainer.run import train

    model_args, data, args = parse_arguments(argv)
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if args.process_index == 0 else logging.WARNING,
    )
    train(model_args, data, args)


if __name__ == "__main__":
    main()
