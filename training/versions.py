"""Versions of installed packages, read without importing them."""

from importlib import metadata


OWN = "hf-vaswani"


def version(package: str) -> str:
    """Installed version of a package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
