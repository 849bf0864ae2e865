"""The guides' fenced blocks."""

import tomllib
from dataclasses import dataclass

from markdown_it import MarkdownIt

from support.paths import ROOT


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, "" for none, its text, its guide and the line on which the text begins."""

    language: str
    text: str
    line: int
    guide: str = "README.md"

    def __str__(self) -> str:
        return f"{self.guide}-{self.language or 'plain'}-line-{self.line}"


def fenced_blocks(guide: str) -> list[Block]:
    tokens = MarkdownIt().parse((ROOT / guide).read_text(encoding="utf-8"))
    return [
        Block(token.info.strip(), token.content, token.map[0] + 2, guide)
        for token in tokens
        if token.type in ("fence", "code_block")
    ]
