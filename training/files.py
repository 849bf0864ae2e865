"""Atomic writes: a file is there whole or not at all."""

import os
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all, whenever the process is killed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save_whole(figure: "Figure", path: Path, dpi: int) -> None:
    """Save a picture that is there whole or not at all.

    Args:
        figure (`matplotlib.figure.Figure`): What it shows.
        path (`Path`): File to write; the ending chooses the format, which is PNG without one.
        dpi (`int`): Dots per inch.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    figure.savefig(partial, format=path.suffix.removeprefix(".") or "png", dpi=dpi)
    partial.replace(path)
