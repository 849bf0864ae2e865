"""Oldest versions of torch and transformers that this code works with, compared on import.

Other files import this one first, so that an older version is named instead of the first thing that it lacks.
"""

import torch
import transformers


OLDEST = {"torch": "2.6", "transformers": "5.18"}


def check_version(name: str, found: str, oldest: str) -> None:
    """Compare major and minor version; a pre-release counts as its release.

    Raises:
        ImportError: `found` is older than `oldest`.
    """
    numbers, needed = ([int(part) for part in version.split(".")[:2]] for version in (found, oldest))
    if numbers < needed:
        raise ImportError(f"hf-vaswani needs {name} {oldest} or newer, found {found}.")


for package in (torch, transformers):
    check_version(package.__name__, package.__version__, OLDEST[package.__name__])

__all__ = ["OLDEST"]
