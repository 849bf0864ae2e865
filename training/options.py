"""Option types for argparse that several commands share."""

import argparse


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
