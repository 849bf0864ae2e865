"""Precision, recall and alignment error rate of word alignments (Och and Ney 2003, "A Systematic Comparison of Various
Statistical Alignment Models").

A gold alignment has sure links, S, and possible links, P, which include S. For predicted links A:

    precision = |A ∩ P| / |A|    recall = |A ∩ S| / |S|    AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..data.readers import DataError, read_columns


Links = set[tuple[int, int]]
LINK = re.compile(r"([0-9]+)([-?p])([0-9]+)")


@dataclass(frozen=True)
class GoldLinks:
    """Gold alignment of a sentence pair, as links from a source word to a target word, counted from 0.

    Attributes:
        sure (`set[tuple[int, int]]`): Sure links.
        possible (`set[tuple[int, int]]`): Possible links, sure ones included.
    """

    sure: Links
    possible: Links


@dataclass(frozen=True)
class AlignmentScore:
    """Scores of all sentence pairs together. A score without a denominator is `None`.

    Attributes:
        precision, recall, error_rate (`float`, *optional*): Between 0 and 1.
    """

    precision: float | None
    recall: float | None
    error_rate: float | None

    def __str__(self) -> str:
        scores = {"precision": self.precision, "recall": self.recall, "alignment error rate": self.error_rate}
        return ", ".join(f"{name} {'none' if score is None else f'{score:.3f}'}" for name, score in scores.items())


def parse_links(line: str) -> GoldLinks:
    """Parse the gold alignment of a sentence pair in the Pharaoh format: `0-0 1-2 2?1`.

    A sure link has a hyphen, a possible link a question mark or a p.

    Raises:
        ValueError: Something else is on the line.
    """
    sure, possible = set(), set()
    for text in line.split():
        if not (link := LINK.fullmatch(text)):
            raise ValueError(f"{text!r} is not a link: expected SOURCE-TARGET (sure) or SOURCE?TARGET (possible)")
        pair = int(link[1]), int(link[3])
        possible.add(pair)
        if link[2] == "-":
            sure.add(pair)
    return GoldLinks(sure, possible)


def read_gold_links(file: str, sources: list[str], translations: list[str]) -> list[GoldLinks]:
    """Read the gold alignments of sentence pairs, one pair per line in the form of `parse_links`.

    Words are those of `text.split()`, counted from 0.

    Raises:
        DataError: A line has something other than links, or a link to a word that does not exist; or the number of
            lines is not that of the pairs. The message names the file and the line.
        FileNotFoundError: The file does not exist.
    """
    [lines] = read_columns([file])
    if len(lines) != len(sources):
        raise DataError(f"{file}: expected {len(sources)} lines, one for each pair, found {len(lines)}.")
    gold = []
    for number, (line, *texts) in enumerate(zip(lines, sources, translations), start=1):
        try:
            links = parse_links(line)
        except ValueError as error:
            raise DataError(f"{file}:{number}: {error}.") from None
        lengths = [len(text.split()) for text in texts]
        for link in sorted(links.possible):
            for side, word, length in zip(("source", "translation"), link, lengths):
                if word >= length:
                    raise DataError(
                        f"{file}:{number}: there is no word {word} in the {side}, which has {length} words counted "
                        f"from 0; found the link {link[0]}-{link[1]}."
                    )
        gold.append(links)
    return gold


def score_alignments(predicted: Iterable[Iterable[tuple[int, int]]], gold: Iterable[GoldLinks]) -> AlignmentScore:
    """Score the predicted links of sentence pairs.

    Args:
        predicted (`Iterable[Iterable[tuple[int, int]]]`): Links of each pair.
        gold (`Iterable[GoldLinks]`): Gold alignment of each pair, equally many.
    """
    number = sure = found_sure = found_possible = 0
    for links, reference in zip(predicted, gold, strict=True):
        links = set(links)
        number += len(links)
        sure += len(reference.sure)
        found_sure += len(links & reference.sure)
        found_possible += len(links & reference.possible)
    return AlignmentScore(
        precision=found_possible / number if number else None,
        recall=found_sure / sure if sure else None,
        error_rate=1 - (found_sure + found_possible) / (number + sure) if number + sure else None,
    )
