"""Versions of installed packages, read without importing them."""

OWN = "hf-vaswani"


def version(package: str) -> str:
    """Installed version of a package, or "not installed"."""
    from importlib import metadata  # slow, and only one option needs it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
