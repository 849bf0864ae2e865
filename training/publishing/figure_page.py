"""Pictures of figures in a folder, and the page that explains them."""

import base64
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..files import save_whole, write_whole
from .figures import PaperFigure


PAGE, DPI = "index.html", 120

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
img { width: 100%; }
section { margin: 3rem 0; }
.paper { color: #1f5aa6; }
pre { background: #f5f6f8; padding: 0.8rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
summary { cursor: pointer; font-family: ui-monospace, monospace; font-size: 13px; }
"""


@dataclass(frozen=True)
class Code:
    """Source of a function or class.

    Attributes:
        name (`str`): Full name.
        file (`str`): File, from the folder of the package on.
        first (`int`): Number of the first line.
        lines (`list[str]`): The lines.
    """

    name: str
    file: str
    first: int
    lines: list[str]

    @property
    def last(self) -> int:
        """Number of the last line."""
        return self.first + len(self.lines) - 1


def code_of(item: Callable) -> Code:
    """Find the source of a function or class of this installation."""
    lines, first = inspect.getsourcelines(item)
    name = f"{item.__module__}.{item.__qualname__}"
    return Code(name, item.__module__.replace(".", "/") + ".py", first, [line.rstrip("\n") for line in lines])


def write_figures(figures: list[PaperFigure], folder: Path) -> list[str]:
    """Write each figure as a picture, and `PAGE` with all of them.

    Args:
        figures (`list[PaperFigure]`): Figures, in the order of the page.
        folder (`Path`): Folder to write to.

    Returns:
        `list[str]`: Names of the files.
    """
    files = [f"{figure.name}.png" for figure in figures]
    for figure, file in zip(figures, files):
        save_whole(figure.picture, folder / file, dpi=DPI)
    write_whole(folder / PAGE, page(figures, [(folder / file).read_bytes() for file in files]))
    return [PAGE, *files]


def page(figures: list[PaperFigure], pictures: list[bytes]) -> str:
    """Render a self-contained HTML page.

    Args:
        figures (`list[PaperFigure]`): Figures.
        pictures (`list[bytes]`): Their PNG files.
    """
    links = "".join(f'<li><a href="#{figure.name}">{escape(figure.title)}</a></li>' for figure in figures)
    sections = "".join(map(section, figures, pictures))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Attention Is All You Need, drawn</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>Attention Is All You Need, drawn</h1>\n<p>Figures of the paper, "
        "computed by the code of hf-vaswani. The lines of the installed code that a figure shows are below it.</p>\n"
        f"<ul>{links}</ul>\n{sections}</body></html>\n"
    )


def section(figure: PaperFigure, picture: bytes) -> str:
    """Render one figure: picture, section of the paper, caption and code."""
    image = base64.b64encode(picture).decode()
    return (
        f'<section id="{figure.name}"><h2>{escape(figure.title)}</h2>\n'
        f'<p class="paper">Section {escape(figure.section)} of the paper. Picture: {figure.name}.png</p>\n'
        f'<img alt="{escape(figure.title)}" src="data:image/png;base64,{image}">\n'
        f"<p>{escape(figure.caption)}</p>\n{''.join(listing(code_of(item)) for item in figure.code)}</section>\n"
    )


def listing(code: Code) -> str:
    """Render the source of a function or class, folded, with line numbers."""
    numbered = "\n".join(f"{number:5}  {line}" for number, line in enumerate(code.lines, start=code.first))
    title = f"{code.name} ({code.file}, lines {code.first} to {code.last})"
    return f"<details><summary>{escape(title)}</summary><pre>{escape(numbered)}</pre></details>\n"
