"""Types of command-line options that several commands share."""

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0, for argparse."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def share(text: str) -> float:
    """A number above 0 and not above 1, for argparse."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return float(text)
