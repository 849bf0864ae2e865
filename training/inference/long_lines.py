"""Cut a line that is too long for the model into pieces that are not, where a reader would pause.

The rule knows no language and no abbreviations. A sentence ends after `. ! ? …`, or their likes in other scripts, with
closing quotes or brackets, where white space follows; none has to after `。！？`. A clause ends in the same way after
a comma, semicolon, colon or dash.
"""

import re
from collections.abc import Callable
from itertools import pairwise


CLOSING = "[\"'”’»)\\]]*"
CLOSING_WIDE = "[」』”’）】》]*"


def _pause(marks: str, wide_marks: str) -> re.Pattern:
    # A run of marks is looked at from its beginning only, lest a line of full stops takes quadratic time.
    return re.compile(rf"(?<![{marks}])[{marks}]++{CLOSING}\s+|[{wide_marks}]+{CLOSING_WIDE}\s*")


SENTENCE_END = _pause(".!?…؟۔।॥։።။។", "。！？｡")
CLAUSE_END = _pause(",;:،؛—–", "，、；：")
SPACE = re.compile(r"\s+")


def split_line(text: str, size: Callable[[str], int], limit: int) -> list[str]:
    """Pieces of a line, in order, none larger than `limit`; only white space between them is left out.

    A line that fits stays as it is. Another is cut at every sentence end. A sentence that is still too long is cut at
    the clause end that is nearest to its middle, or if it has none at such white space, and so are its parts, until
    they fit.

    Args:
        text (`str`): A line.
        size (`Callable[[str], int]`): Tokens of a text.
        limit (`int`): Most tokens of a piece.

    Raises:
        ValueError: A stretch without white space is too long.

    >>> split_line("Nein! Er kam, sah und ging.", size=len, limit=15)
    ['Nein!', 'Er kam,', 'sah und ging.']
    """
    if size(text) <= limit:
        return [text]
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    sentences = (text[start:end].strip() for start, end in pairwise(ends))
    return [piece for sentence in sentences if sentence for piece in _halve(sentence, size, limit)]


def _halve(text: str, size: Callable[[str], int], limit: int) -> list[str]:
    if (found := size(text)) <= limit:
        return [text]
    for end in (CLAUSE_END, SPACE):
        cuts = [match.end() for match in end.finditer(text) if match.end() < len(text)]
        if cuts:
            middle = min(cuts, key=lambda cut: abs(2 * cut - len(text)))
            return [piece for part in (text[:middle], text[middle:]) for piece in _halve(part.strip(), size, limit)]
    raise ValueError(f"{found} tokens without white space to split them at, where {limit} are allowed: {text[:60]!r}")
