"""Labelled bracketing F1 of trees (section 6.3 of the paper), as a metric of sacreBLEU.

The rules are those of the program EVALB, see `data.brackets`, with two differences. The tags of the gold tree say what
is punctuation. No sentence is left out of the sums: EVALB skips a sentence without a tree or with other words, so that
perfect trees for half of the sentences and none for the others have an F1 of 100.
"""

import re
from collections.abc import Iterable
from typing import Any

from sacrebleu.metrics.base import Metric, Score, Signature

from ..data.brackets import agreement, f1, gold_tags
from ..data.trees import Tree, TreeError, parse_tree, restore


_SYMBOL = re.compile(r"[()]?[^\s()]+")


class BracketingSignature(Signature):
    """Signature of `Bracketing`."""

    def __init__(self, args: dict):
        super().__init__(args)
        self.info |= {"rules": "evalb-collins", "punctuation": "gold-tags", "left-out": "none"}
        self._abbr |= {"rules": "r", "punctuation": "p", "left-out": "lo"}


class BracketingScore(Score):
    """F1 with its components.

    Attributes:
        details (`dict`): `precision`, `recall`, `exact_match` (all in percent), the numbers of brackets `matched`, in
            the `gold` trees and in the `predicted` ones, and the numbers of trees that are `mended` and `missing`.
    """

    def __init__(self, matched: int, gold: int, predicted: int, exact: int, mended: int, missing: int, trees: int):
        super().__init__("F1", f1(matched, gold, predicted))
        self.details = {
            "precision": 100 * matched / predicted if predicted else 0.0,
            "recall": 100 * matched / gold if gold else 0.0,
            "exact_match": 100 * exact / trees if trees else 0.0,
            "matched": matched,
            "gold": gold,
            "predicted": predicted,
            "mended": mended,
            "missing": missing,
        }


class Bracketing(Metric):
    """Labelled bracketing F1 of predicted trees; there is one gold tree for each.

    A prediction is a tree in brackets, or the symbols of a linearised tree. Symbols are restored to a tree over the
    words of the gold tree, and counted as *mended* if they are malformed. A prediction is *missing* if it is neither,
    or a tree over other words: no bracket of it agrees, and those of the gold tree count as not found.
    """

    _SIGNATURE_TYPE = BracketingSignature

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: list[str]) -> dict[str, Any]:
        if len(refs) != 1:
            raise ValueError(f"Bracketing compares with one gold tree, got {len(refs)}.")
        return {"gold": parse_tree(refs[0])}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict) -> list[int]:
        gold = ref_kwargs["gold"]
        tree, is_mended = predicted_tree(hypothesis, gold)
        is_missing = tree is None or gold_tags(gold, tree) is None
        found = agreement(gold, tree)
        return [*found, int(found.is_exact and not is_missing), int(is_mended), int(is_missing), 1]

    def _aggregate_and_compute(self, stats: Iterable[Iterable[int]]) -> BracketingScore:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats)])

    def _compute_score_from_stats(self, stats: Iterable[int]) -> BracketingScore:
        return BracketingScore(*(int(count) for count in stats))


def predicted_tree(text: str, gold: Tree) -> tuple[Tree | None, bool]:
    """Tree of a line, and whether it was mended; `None` for a line that is neither a tree nor symbols."""
    try:
        return parse_tree(text), False
    except TreeError:
        symbols = text.split()
        if not symbols or not all(map(_SYMBOL.fullmatch, symbols)):
            return None, False
    tree, counts = restore(symbols, gold.words())
    return tree, bool(counts)
