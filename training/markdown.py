"""Escaping of arbitrary text in Markdown, so that it is displayed literally."""

import re
from html import escape


# Control characters, and lone surrogates, which UTF-8 cannot encode. File names may contain both.
UNWRITABLE = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ud800-\udfff]")


def one_line(text: object) -> str:
    """Put text on one line with single spaces. Unwritable characters become `�`."""
    return " ".join(UNWRITABLE.sub("\ufffd", str(text)).split())


def as_markdown(text: object) -> str:
    """Put text on one line and escape it for Markdown, for use anywhere but at the beginning of a block."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", one_line(text))


def as_paragraph(text: object) -> str:
    """Escape text as `as_markdown`, also for the beginning of a block, where `1. a` would start a list."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", as_markdown(text))


def as_code(text: object) -> str:
    """Format text as inline code. Text that opens an HTML comment is escaped instead, because inline code would not
    hide it."""
    line = UNWRITABLE.sub("\ufffd", re.sub(r"[\r\n]+", " ", str(text)))
    if "<!--" in line or not line.strip():
        return as_markdown(line)
    fence = "`" * (_longest_fence(line) + 1)
    space = " " if line.startswith(("`", " ")) or line.endswith(("`", " ")) else ""
    return f"{fence}{space}{line}{space}{fence}"


def as_code_block(text: str, language: str) -> str:
    """Format text of any number of lines as a code block."""
    text = UNWRITABLE.sub("\ufffd", re.sub(r"\r\n?", "\n", text))
    if "<!--" in text:
        return f"<pre>\n{escape(text, quote=False)}\n</pre>"
    fence = "`" * max(3, _longest_fence(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
