"""Formats of translations: text, Moses' n-best list, JSON lines."""

import json
from collections.abc import Callable

from .search import Translation


# What is written for a sentence: its number from 0, its source, its translations, best first.
Format = Callable[[int, str, list[Translation]], str]


def as_text(number: int, source: str, translations: list[Translation]) -> str:
    """The best translation, a line.

    >>> as_text(7, "A dog.", [Translation("Ein Hund.")])
    'Ein Hund.\\n'
    """
    return translations[0].text.replace("\n", " ") + "\n"


def as_nbest(number: int, source: str, translations: list[Translation]) -> str:
    """Moses' n-best list, `number ||| text ||| score`: as many lines for each sentence, also for an empty one.

    >>> as_nbest(7, "A dog.", [Translation("Ein Hund.", -0.25)])
    '7 ||| Ein Hund. ||| -0.2500\\n'
    """
    lines = ((translation.text.replace("\n", " "), translation.score) for translation in translations)
    return "".join(f"{number} ||| {text} ||| {score:.4f}\n" for text, score in lines)


def as_jsonl(number: int, source: str, translations: list[Translation]) -> str:
    """A JSON object a sentence, with every token's log probability; an empty source has no translations."""
    rows = [
        {
            "text": translation.text,
            "score": round(translation.score, 4),
            "log_probability": round(translation.log_probability, 4),
            "tokens": [[text, round(number, 4)] for text, number in translation.tokens],
        }
        for translation in translations
        if source.strip()
    ]
    return json.dumps({"source": source, "translations": rows}, ensure_ascii=False, allow_nan=False) + "\n"


FORMATS: dict[str, Format] = {"text": as_text, "nbest": as_nbest, "jsonl": as_jsonl}
