"""Recipes in the package."""

from importlib import resources
from pathlib import Path


RECIPES = resources.files(__package__.rpartition(".")[0]) / "recipes"


def packaged_recipes() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(Path(entry.name).stem for entry in RECIPES.iterdir() if entry.name.endswith(".yaml"))
