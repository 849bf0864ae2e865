"""Versions of installed packages, read without importing them."""

from importlib import metadata


OWN = "hf-vaswani"


def version(package: str) -> str:
    """The installed version of a package; "not installed" where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
