"""Text from elsewhere in Markdown: it is shown as it is, whatever it holds."""

import re
from html import escape


# Of control characters, and of halves of a character that UTF-8 cannot write: a file name may hold them.
UNWRITABLE = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ud800-\udfff]")


def one_line(text: object) -> str:
    """Text on one line, with single spaces; what cannot be written is `�`."""
    return " ".join(UNWRITABLE.sub("\ufffd", str(text)).split())


def as_markdown(text: object) -> str:
    """Text on one line that Markdown shows as it is, anywhere but at the beginning of a block."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", one_line(text))


def as_paragraph(text: object) -> str:
    """The same, at the beginning of a block too: `1. a` begins no list, `---` is no rule."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", as_markdown(text))


def as_code(text: object) -> str:
    """Text as code within a line; escaped text where it holds the beginning of a comment, which code cannot hide."""
    line = UNWRITABLE.sub("\ufffd", re.sub(r"[\r\n]+", " ", str(text)))
    if "<!--" in line or not line.strip():
        return as_markdown(line)
    fence = "`" * (_longest_fence(line) + 1)
    space = " " if line.startswith(("`", " ")) or line.endswith(("`", " ")) else ""
    return f"{fence}{space}{line}{space}{fence}"


def as_code_block(text: str, language: str) -> str:
    """Text of any number of lines as a block of code."""
    text = UNWRITABLE.sub("\ufffd", re.sub(r"\r\n?", "\n", text))
    if "<!--" in text:
        return f"<pre>\n{escape(text, quote=False)}\n</pre>"
    fence = "`" * max(3, _longest_fence(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
