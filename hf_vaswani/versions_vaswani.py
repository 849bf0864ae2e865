"""Oldest supported versions of torch and transformers, checked on import.

Other files import this one first, so an older version raises a clear error instead of an error on a missing name.
"""

import torch
import transformers


OLDEST = {"torch": "2.6", "transformers": "5.18"}


def check_version(name: str, found: str, oldest: str) -> None:
    """Check the major and minor version; a pre-release counts as its release.

    Raises:
        ImportError: `found` is older than `oldest`.
    """
    numbers, needed = ([int(part) for part in version.split(".")[:2]] for version in (found, oldest))
    if numbers < needed:
        raise ImportError(f"hf-vaswani needs {name} {oldest} or newer, found {found}.")


for package in (torch, transformers):
    check_version(package.__name__, package.__version__, OLDEST[package.__name__])

__all__ = ["OLDEST"]
