"""Output formats of translations: plain text, Moses n-best lists, JSON lines, and trees."""

import json
from collections import Counter
from collections.abc import Callable

from ..data.trees import restore, tree_words
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


class AsTrees:
    """Format of a parser: well-formed trees over exactly the words of the source, one per line, or n-best lists.

    An empty or skipped sentence has no tree.

    Args:
        n_best (`int`): Trees per sentence; several make an n-best list.

    Attributes:
        trees (`int`): Number of trees so far.
        mended (`int`): Number of trees whose symbols were malformed.
        counts (`Counter[str]`): What was mended, see `trees.MENDED`.

    >>> AsTrees(1)(7, "Go home", [Translation("(VP VB (NP NN )VP")])
    '(VP (VB Go) (NP (NN home)))\\n'
    """

    def __init__(self, n_best: int):
        self.write = as_text if n_best == 1 else as_nbest
        self.trees = self.mended = 0
        self.counts: Counter[str] = Counter()

    def __call__(self, number: int, source: str, translations: list[Translation], skipped: str | None = None) -> str:
        words = tree_words(source)
        if words and skipped is None:
            translations = [Translation(self._tree(each.text, words), each.score) for each in translations]
        return self.write(number, source, translations, skipped)

    def _tree(self, symbols: str, words: list[str]) -> str:
        tree, counts = restore(symbols.split(), words)
        self.trees, self.mended, self.counts = self.trees + 1, self.mended + bool(counts), self.counts + counts
        return str(tree)

    def report(self) -> str:
        """Sentence about what was mended.

        >>> AsTrees(1).report()
        'Mended 0 of 0 trees.'
        """
        found = ", ".join(f"{number} {kind}" for kind, number in self.counts.most_common())
        return f"Mended {self.mended} of {self.trees} trees{': ' * bool(found)}{found}."


def make_format(name: str, n_best: int) -> Format | AsTrees:
    """Format of a name in `choices.FORMATS`."""
    return AsTrees(n_best) if name == "tree" else {"text": as_text, "nbest": as_nbest, "jsonl": as_jsonl}[name]
