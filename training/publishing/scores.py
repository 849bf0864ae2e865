"""Score files written by `hf-vaswani score --json`."""

import math
from pathlib import Path
from typing import Any, TypedDict

from ..data.readers import DataError, check_file
from ..evaluation.metrics import Comparison, Interval, MetricScore
from ..evaluation.report import Report
from ..json_records import check_fields, read_record


class ReportFile(TypedDict):
    """Fields of a score file that a card needs."""

    system: str
    sentences: int
    empty: int
    figures: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]


class FigureFile(TypedDict):
    """Fields of a figure in a score file."""

    name: str
    score: int | float | None
    signature: str
    interval: dict[str, Any] | None
    details: dict[str, Any]
    note: str
    digits: int


class IntervalFile(TypedDict):
    """Fields of a figure's interval."""

    mean: int | float
    half_width: int | float
    samples: int


class BleuFile(TypedDict):
    """Components of a BLEU score."""

    precisions: list[int | float]
    brevity_penalty: int | float
    hypothesis_length: int
    reference_length: int


class BracketingFile(TypedDict):
    """Components of a bracketing F1."""

    precision: int | float
    recall: int | float
    exact_match: int | float
    matched: int
    gold: int
    predicted: int
    mended: int
    missing: int


class ComparisonFile(TypedDict):
    """Fields of a comparison in a score file."""

    metric: str
    baseline: str
    baseline_score: int | float
    score: int | float
    p_values: dict[str, int | float]
    signatures: dict[str, str]


def read_report(path: str) -> Report:
    """Read a report that `hf-vaswani score --json` wrote.

    Raises:
        DataError: The file is not such a report; the message names file and field.
        OSError: The file does not exist or cannot be read.
    """
    check_file(path)
    try:
        record = read_record(Path(path), ReportFile)
        _check_finite(record, path)
        for index, comparison in enumerate(record["comparisons"]):
            check_fields(comparison, ComparisonFile, f"{path}: comparisons[{index}]")
        figures = [_figure(f"{path}: figures[{index}]", **figure) for index, figure in enumerate(record["figures"])]
        comparisons = [Comparison(**comparison) for comparison in record["comparisons"]]
    except (ValueError, TypeError) as error:  # TypeError: unknown field
        raise DataError(f"{path}: expected the output of `hf-vaswani score --json`: {error}") from error
    return Report(record["system"], record["sentences"], record["empty"], figures, comparisons)


def _check_finite(value: object, location: str) -> None:
    """Raise ValueError, naming the location, for NaN, infinity and overflowing numbers such as 1e999."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            _check_finite(item, f"{location}: {name}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{location}: expected a finite number, found {value}.")


def _figure(location: str, score: float | None = None, interval: dict | None = None, **fields) -> MetricScore:
    """A figure from JSON; a score of null is an infinite perplexity."""
    check_fields({"score": score, "interval": interval, **fields}, FigureFile, location)
    if interval is not None:
        check_fields(interval, IntervalFile, f"{location}: interval")
    if "precisions" in fields["details"]:
        check_fields(fields["details"], BleuFile, f"{location}: details")
    if "exact_match" in fields["details"]:
        check_fields(fields["details"], BracketingFile, f"{location}: details")
    if not 0 <= fields["digits"] <= 20:
        raise ValueError(f"{location}: digits: expected 0 to 20, found {fields['digits']}.")
    return MetricScore(
        score=math.inf if score is None else score, interval=Interval(**interval) if interval else None, **fields
    )
