"""Split lines that are too long for the model at the ends of sentences and clauses.

The rules are independent of the language and know no abbreviations. A sentence ends at `. ! ? …` or their equivalents
in other scripts, followed by optional closing quotes or brackets and by white space. White space is optional after the
full-width `。！？`. A clause ends in the same way at a comma, semicolon, colon or dash.
"""

import re
from collections.abc import Callable
from itertools import pairwise


CLOSING = "[\"'”’»)\\]]*"
CLOSING_WIDE = "[」』”’）】》]*"


def _pause(marks: str, wide_marks: str) -> re.Pattern:
    # A run of marks matches only from its beginning; otherwise a line of full stops would take quadratic time.
    return re.compile(rf"(?<![{marks}])[{marks}]++{CLOSING}\s+|[{wide_marks}]+{CLOSING_WIDE}\s*")


SENTENCE_END = _pause(".!?…؟۔।॥։።။។", "。！？｡")
CLAUSE_END = _pause(",;:،؛—–", "，、；：")
SPACE = re.compile(r"\s+")


def split_line(text: str, size: Callable[[str], int], limit: int) -> list[str]:
    """Split a line into pieces of at most `limit` tokens. Only white space between pieces is dropped.

    A line within the limit is returned whole. A longer line is split at every sentence end. A sentence that is still
    too long is split recursively at the clause end nearest to its middle, or at white space if it has no clause end.

    Args:
        text (`str`): Line to split.
        size (`Callable[[str], int]`): Function that counts the tokens of a text.
        limit (`int`): Maximum number of tokens per piece.

    Raises:
        ValueError: A stretch of text without white space exceeds the limit.

    >>> split_line("Nein! Er kam, sah und ging.", size=len, limit=15)
    ['Nein!', 'Er kam,', 'sah und ging.']
    """
    if size(text) <= limit:
        return [text]
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    sentences = (text[start:end].strip() for start, end in pairwise(ends))
    return [piece for sentence in sentences if sentence for piece in _halve(sentence, size, limit)]


def _halve(text: str, size: Callable[[str], int], limit: int) -> list[str]:
    if (tokens := size(text)) <= limit:
        return [text]
    for boundary in (CLAUSE_END, SPACE):
        cuts = [match.end() for match in boundary.finditer(text) if match.end() < len(text)]
        if cuts:
            middle = min(cuts, key=lambda cut: abs(2 * cut - len(text)))
            return [piece for part in (text[:middle], text[middle:]) for piece in _halve(part.strip(), size, limit)]
    raise ValueError(f"{tokens} tokens without white space to split them at, where {limit} are allowed: {text[:60]!r}")
