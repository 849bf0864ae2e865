"""Scores in files, as `hf-vaswani score --json` prints them."""

import math
from pathlib import Path
from typing import Any, TypedDict

from ..data.readers import DataError, check_file
from ..evaluation.metrics import Comparison, Interval, MetricScore
from ..evaluation.report import Report
from ..json_records import check_fields, read_record


class ReportFile(TypedDict):
    """What `hf-vaswani score --json` prints, as far as a card shows it."""

    system: str
    sentences: int
    empty: int
    figures: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]


class FigureFile(TypedDict):
    """One of its figures."""

    name: str
    score: int | float | None
    signature: str
    interval: dict[str, Any] | None
    details: dict[str, Any]
    note: str
    digits: int


class IntervalFile(TypedDict):
    """The interval of a figure."""

    mean: int | float
    half_width: int | float
    samples: int


class BleuFile(TypedDict):
    """What a BLEU is made of."""

    precisions: list[int | float]
    brevity_penalty: int | float
    hypothesis_length: int
    reference_length: int


class ComparisonFile(TypedDict):
    """One of its comparisons."""

    metric: str
    baseline: str
    baseline_score: int | float
    score: int | float
    p_values: dict[str, int | float]
    signatures: dict[str, str]


def read_report(path: str) -> Report:
    """A report as `hf-vaswani score --json` writes it.

    Raises:
        DataError: It is something else; the message names file and field.
        OSError: No such file, or it cannot be read.
    """
    check_file(path)
    try:
        found = read_record(Path(path), ReportFile)
        _check_finite(found, path)
        for index, comparison in enumerate(found["comparisons"]):
            check_fields(comparison, ComparisonFile, f"{path}: comparisons[{index}]")
        figures = [_figure(f"{path}: figures[{index}]", **figure) for index, figure in enumerate(found["figures"])]
        comparisons = [Comparison(**comparison) for comparison in found["comparisons"]]
    except (ValueError, TypeError) as error:  # TypeError: a field that there is not
        raise DataError(f"{path}: expected what `hf-vaswani score --json` prints: {error}") from error
    return Report(found["system"], found["sentences"], found["empty"], figures, comparisons)


def _check_finite(value: object, place: str) -> None:
    """Raises ValueError, naming the place, for a number that JSON does not have, or too large a one, such as 1e999."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            _check_finite(item, f"{place}: {name}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}: expected a finite number, found {value}.")


def _figure(place: str, score: float | None = None, interval: dict | None = None, **more) -> MetricScore:
    """As JSON has it, where null is a perplexity that no float can hold."""
    check_fields({"score": score, "interval": interval, **more}, FigureFile, place)
    if interval is not None:
        check_fields(interval, IntervalFile, f"{place}: interval")
    if "precisions" in more["details"]:
        check_fields(more["details"], BleuFile, f"{place}: details")
    if not 0 <= more["digits"] <= 20:
        raise ValueError(f"{place}: digits: expected at most 20, found {more['digits']}.")
    return MetricScore(
        score=math.inf if score is None else score, interval=Interval(**interval) if interval else None, **more
    )
