"""Output formats of translations: plain text, Moses n-best lists and JSON lines."""

import json
from collections.abc import Callable

from .choices import FORMATS
from .search import Translation


# Function that formats one sentence from its number, counted from 0, its source, its translations, best first, and the
# reason why it was skipped.
Format = Callable[[int, str, list[Translation], str | None], str]


def as_text(number: int, source: str, translations: list[Translation], skipped: str | None = None) -> str:
    """Format the best translation as one line.

    >>> as_text(7, "A dog.", [Translation("Ein Hund.")])
    'Ein Hund.\\n'
    """
    return translations[0].text.replace("\n", " ") + "\n"


def as_nbest(number: int, source: str, translations: list[Translation], skipped: str | None = None) -> str:
    """Format an n-best list of Moses, with one line `number ||| text ||| score` per translation. An empty sentence
    has as many lines as any other.

    >>> as_nbest(7, "A dog.", [Translation("Ein Hund.", -0.25)])
    '7 ||| Ein Hund. ||| -0.2500\\n'
    """
    lines = ((translation.text.replace("\n", " "), translation.score) for translation in translations)
    return "".join(f"{number} ||| {text} ||| {score:.4f}\n" for text, score in lines)


def as_jsonl(number: int, source: str, translations: list[Translation], skipped: str | None = None) -> str:
    """Format a sentence as one JSON object, with the log probability of every token. An empty source has no
    translations. A skipped one has none either, but the reason in `skipped`."""
    rows = [
        {
            "text": translation.text,
            "score": round(translation.score, 4),
            "log_probability": round(translation.log_probability, 4),
            "tokens": [[text, round(number, 4)] for text, number in translation.tokens],
        }
        for translation in translations
        if source.strip() and skipped is None
    ]
    reason = {} if skipped is None else {"skipped": skipped}
    return json.dumps({"source": source, "translations": rows, **reason}, ensure_ascii=False, allow_nan=False) + "\n"


FORMATTERS: dict[str, Format] = dict(zip(FORMATS, (as_text, as_nbest, as_jsonl), strict=True))
