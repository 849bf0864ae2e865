"""Command-line options and argparse types that several commands share."""

import argparse
import math


DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def share(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return float(text)


def finite(text: str) -> float:
    """Parse a number that is neither NaN nor infinite."""
    if not math.isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return float(text)


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Add `--trust-remote-code`, the option of every command that loads a checkpoint."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that a foreign model or tokenizer brings along (default: refuse it)",
    )


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Add `--dtype`, the data type in which a command computes."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="data type of the computation (default: that of the weights)"
    )
