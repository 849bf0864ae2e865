"""Report of scores, formatted as a text table, Markdown or a JSON object."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from ..markdown import as_markdown
from .metrics import Bucket, Comparison, Example, MetricScore


@dataclass
class Report:
    """Result of `hf-vaswani score`.

    Attributes:
        system (`str`): File of the translations or name of the model, and name of the test set if it has one.
        sentences (`int`): Number of sentences.
        empty (`int`): Number of empty translations.
        figures (`list[MetricScore]`): Score of each metric.
        comparisons (`list[Comparison]`): Comparisons with each baseline in each metric.
        length_of (`str`): Text whose length defines the `buckets`.
        buckets (`list[Bucket]`): Scores by length.
        examples_by (`str`): Metric that ranks the examples.
        worst, best (`list[Example]`): Sentences with the lowest and the highest scores.
    """

    system: str
    sentences: int
    empty: int
    figures: list[MetricScore]
    comparisons: list[Comparison] = field(default_factory=list)
    length_of: str = ""
    buckets: list[Bucket] = field(default_factory=list)
    examples_by: str = ""
    worst: list[Example] = field(default_factory=list)
    best: list[Example] = field(default_factory=list)


def as_json(report: Report) -> str:
    """Format a report as one JSON object, with the first figure repeated at the top level and null for infinity.

    Raises:
        ValueError: A score is NaN.
    """
    for figure in report.figures:
        if math.isnan(figure.score):
            raise ValueError(f"{figure.name} of {report.system} is not a number (NaN).")
    first, rest = report.figures[0], asdict(report)
    top = {"metric": first.name, "score": first.score, "signature": first.signature, **first.details}
    return json.dumps(finite({**top, **rest}), ensure_ascii=False, allow_nan=False)


def finite(value):
    """Replace NaN and infinity in a JSON value by `None`."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(report: Report, markdown: bool = False, level: int = 3) -> str:
    """Format a report as text or Markdown; `level` is the depth of the Markdown headings."""
    parts = [_figures(report, markdown)]
    if report.comparisons:
        parts += [_heading("Against baselines", markdown, level), _comparisons(report.comparisons, markdown)]
    if report.buckets:
        heading = f"By length of the {report.length_of} in words"
        parts += [_heading(heading, markdown, level), _buckets(report.buckets, markdown)]
    for kind, examples in (("Worst", report.worst), ("Best", report.best)):
        if examples:
            heading = f"{kind} sentences by {report.examples_by}"
            parts += [_heading(heading, markdown, level), _examples(examples, markdown)]
    return "\n\n".join(parts)


def _heading(text: str, markdown: bool, level: int) -> str:
    return f"{'#' * level} {text}" if markdown else f"{text}:"


def _figures(report: Report, markdown: bool) -> str:
    columns = {
        "metric": [figure.name for figure in report.figures],
        "score": [_number(figure.score, figure.digits) for figure in report.figures],
        "95% interval": [_interval(figure) for figure in report.figures],
        "signature": [figure.signature for figure in report.figures],
    }
    if not any(figure.interval for figure in report.figures):
        del columns["95% interval"]
    table = _grid(list(columns), [list(row) for row in zip(*columns.values())], markdown, right={1})
    lines = [f"{report.system}: {report.sentences} sentences" + (f", {report.empty} empty" if report.empty else "")]
    for figure in report.figures:
        if "precisions" in figure.details:
            lines.append(f"{figure.name}: {_bleu_parts(figure.details)}")
        if "exact_match" in figure.details:
            lines.append(f"{figure.name}: {_bracketing_parts(figure.details)}")
    lines += [f"{figure.name}: {figure.note}" for figure in report.figures if figure.note]
    return f"{table}\n\n" + "\n".join(_listed(lines, markdown))


def _bleu_parts(details: dict) -> str:
    precisions = "/".join(f"{p:.1f}" for p in details["precisions"])
    lengths = f"{details['hypothesis_length']} words for {details['reference_length']}"
    return f"{precisions}, BP {details['brevity_penalty']:.3f}, {lengths}"


def _bracketing_parts(details: dict) -> str:
    shares = f"precision {details['precision']:.2f}, recall {details['recall']:.2f}, exact match "
    shares += f"{details['exact_match']:.2f}%"
    brackets = (
        f"{details['matched']:,} of {details['predicted']:,} predicted and {details['gold']:,} gold brackets agree"
    )
    return f"{shares}; {brackets}; trees mended: {details['mended']:,}, missing: {details['missing']:,}"


def _interval(figure: MetricScore) -> str:
    if figure.interval is None:
        return "-"
    return f"{_number(figure.interval.mean, figure.digits)} ± {_number(figure.interval.half_width, figure.digits)}"


def _comparisons(comparisons: list[Comparison], markdown: bool) -> str:
    tests = list(comparisons[0].p_values)
    header = ["baseline", "metric", "its score", "difference", *(f"p ({test})" for test in tests)]
    rows = [
        [c.baseline, c.metric, _number(c.baseline_score), f"{c.score - c.baseline_score:+.2f}"]
        + [f"{c.p_values[test]:.4f}" for test in tests]
        for c in comparisons
    ]
    signatures = dict.fromkeys(f"{c.metric}, {test}: {c.signatures[test]}" for c in comparisons for test in tests)
    table = _grid(header, rows, markdown, right=set(range(2, 4 + len(tests))))
    return f"{table}\n\n" + "\n".join(_listed(signatures, markdown))


def _buckets(buckets: list[Bucket], markdown: bool) -> str:
    names = list(next(bucket for bucket in buckets if bucket.scores).scores)
    rows = []
    for bucket in buckets:
        lengths = f"{bucket.shortest}+" if bucket.longest is None else f"{bucket.shortest}-{bucket.longest}"
        scores = [_number(bucket.scores[name]) if bucket.scores else "-" for name in names]
        rows.append([lengths, str(bucket.sentences), *scores])
    return _grid(["words", "sentences", *names], rows, markdown, right=set(range(1, 2 + len(names))))


def _examples(examples: list[Example], markdown: bool) -> str:
    blocks = []
    for example in examples:
        lines = [] if example.source is None else [f"source: {example.source}"]
        lines += [f"translation: {example.hypothesis}", *(f"reference: {text}" for text in example.references)]
        head = f"line {example.line}, {example.score:.1f}"
        if markdown:
            blocks.append("\n".join([f"- {head}", *(f"  - {as_markdown(line)}" for line in lines)]))
        else:
            blocks.append("\n".join([head, *(f"  {line}" for line in lines)]))
    return "\n".join(blocks)


def _listed(lines: Iterable[str], markdown: bool) -> Iterable[str]:
    return (f"- {as_markdown(line)}" for line in lines) if markdown else lines


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}"


def _grid(header: list[str], rows: list[list[str]], markdown: bool, right: set[int]) -> str:
    """Format a table; `right` holds the indices of right-aligned columns."""
    if markdown:
        rule = ["--:" if i in right else "---" for i in range(len(header))]
        header, *rows = ([as_markdown(cell) for cell in row] for row in (header, *rows))
        cells = [header, rule, *rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join(lines)
