"""Brackets of trees and their agreement, by the rules of the program EVALB (parameters COLLINS.prm).

- A bracket is a label and the words that it spans. Tags are not brackets. The root `TOP` does not count.
- A label ends before its first `-` or `=`. `PRT` is `ADVP`.
- Traces, and words that are punctuation by their gold tag, are removed before spans are compared. EVALB takes the
  tags of the predicted tree there. A phrase without another word does not count.
- The brackets of a tree are a multiset: two phrases with one label over the same words are two brackets.
"""

import re
from collections import Counter
from typing import NamedTuple

from .trees import EMPTY_TAG, TOP, Tree


PUNCTUATION = {",", ":", "``", "''", "."}  # tags
SAME_LABEL = {"PRT": "ADVP"}

Bracket = tuple[str, int, int]


class Agreement(NamedTuple):
    """Number of brackets in both trees, in the gold tree, and in the predicted tree."""

    matched: int
    gold: int
    predicted: int

    @property
    def is_exact(self) -> bool:
        return self.matched == self.gold == self.predicted


def agreement(gold: Tree, predicted: Tree | None) -> Agreement:
    """Compare a predicted tree with the gold tree.

    Without a tree, or with one over other words, no bracket agrees, and all brackets of both trees count.
    """
    tags = _tags_of_words(gold)
    expected = brackets(gold, tags)
    if predicted is None:
        return Agreement(0, expected.total(), 0)
    if _words(predicted) != _words(gold):
        return Agreement(0, expected.total(), brackets(predicted, _tags_of_words(predicted)).total())
    found = brackets(predicted, tags)
    return Agreement((expected & found).total(), expected.total(), found.total())


def has_same_words(gold: Tree, predicted: Tree) -> bool:
    """Return `True` if two trees have the same words, traces apart."""
    return _words(predicted) == _words(gold)


def brackets(tree: Tree, tags: list[str]) -> Counter[Bracket]:
    """Brackets that count: label, first word and word behind the last, in words that are not punctuation.

    Args:
        tree (`Tree`): A tree.
        tags (`list[str]`): Tags of its words, traces apart, that say which words are punctuation.
    """
    kept = [0]  # words that are not punctuation, up to each position of the tree
    tags_left = iter(tags)
    for tag in tree.tags():
        kept.append(kept[-1] + (tag != EMPTY_TAG and next(tags_left) not in PUNCTUATION))
    found = ((scored_label(label), kept[start], kept[end]) for label, start, end in tree.spans())
    return Counter(bracket for bracket in found if bracket[0] != TOP and bracket[1] < bracket[2])


def scored_label(label: str) -> str:
    """The part of a label that is compared.

    >>> scored_label("NP-SBJ-1"), scored_label("VP=2"), scored_label("PRT")
    ('NP', 'VP', 'ADVP')
    """
    short = re.split("[-=]", label, maxsplit=1)[0]
    return SAME_LABEL.get(short, short)


def f1(matched: int, gold: int, predicted: int) -> float:
    """Labelled F1 in percent: `2 matched / (gold + predicted)`; 0 without brackets.

    >>> f1(3, 5, 4)
    66.66666666666667
    """
    return 200 * matched / (gold + predicted) if gold + predicted else 0.0


def _words(tree: Tree) -> list[str]:
    return [word for word, tag in zip(tree.words(), tree.tags()) if tag != EMPTY_TAG]


def _tags_of_words(tree: Tree) -> list[str]:
    return [tag for tag in tree.tags() if tag != EMPTY_TAG]
