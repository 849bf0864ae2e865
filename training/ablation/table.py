"""Table of the finished runs of an ablation beside Table 3 of the paper, as Markdown, JSON and a figure."""

import json
import math
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypedDict

from filelock import FileLock

from hf_vaswani import TABLE_3, VaswaniConfig

from ..files import save_whole, write_whole
from ..json_records import read_record
from ..paper import PAPER


RESULT = "result.json"  # file of a finished run in its folder ROW/seed-SEED
METRICS = {"perplexity": "PPL", "bleu": "BLEU"}
COSTS = ("updates", "source_tokens", "target_tokens", "seconds", "evaluation_seconds")
AGREES, DISAGREES, NOISE = "agrees", "does not agree", "within noise"
RULE = (
    "A difference from base is significant if it is more than twice its standard error, `s * sqrt(1/n + 1/n_base)`, "
    "where n is the number of seeds and s the standard deviation over seeds, pooled over all rows. A significant "
    "difference *agrees* with the paper if it has the same sign, and *does not agree* if the paper's has the other "
    "sign or is 0. A difference that is not significant *agrees* if the paper's is 0, and is *within noise* otherwise."
)
ONE_SEED = "No row has two seeds, so the noise is unknown and only the signs are compared."


class ResultFile(TypedDict):
    """Content of `result.json`."""

    row: str
    seed: int
    differs: dict[str, Any]
    parameters: int
    updates: int | None
    source_tokens: int | None
    target_tokens: int | None
    seconds: int | float | None
    evaluation_seconds: int | float | None
    perplexity: int | float
    bleu: int | float
    metric: str
    signature: str
    averaged: int


def read_results(folder: Path) -> list[dict]:
    """Read the results of the finished runs in an ablation's folder, sorted by row of Table 3 and by seed.

    Raises:
        FileNotFoundError: The folder has no finished run.
        ValueError: A result is broken; the message names file and field.
    """
    results = [_read_result(path) for path in folder.glob(f"*/seed-*/{RESULT}")]
    if not results:
        raise FileNotFoundError(f"{folder}: no finished run, expected ROW/seed-SEED/{RESULT}.")
    rows = list(TABLE_3)
    return sorted(results, key=lambda result: (rows.index(result["row"]), result["seed"]))


def _read_result(path: Path) -> dict:
    result = read_record(path, ResultFile)
    if result["row"] not in TABLE_3:
        raise ValueError(f"{path}: row: expected one of Table 3, found {result['row']!r:.60}.")
    for name in METRICS:
        if not math.isfinite(result[name]):
            raise ValueError(f"{path}: {name}: expected a finite number, found {result[name]}.")
    return result


def summary(results: list[dict]) -> dict:
    """Means over seeds, differences from base, the paper's differences, and the verdicts on them.

    Args:
        results (`list[dict]`): Results of the runs, as written by `hf-vaswani ablate`.

    Returns:
        `rows`, by name; `spread`, the pooled standard deviation of each metric (`None` if no row has two seeds);
        `cost`, the sums of the known values over all runs; `runs of unknown time`, their number; and `metric`,
        `signature` and `averaged`, the distinct settings of the evaluation.
    """
    groups = defaultdict(list)
    for result in results:
        groups[result["row"]].append(result)
    values = {row: {name: [run[name] for run in runs] for name in METRICS} for row, runs in groups.items()}
    spread = {name: _pooled([metrics[name] for metrics in values.values()]) for name in METRICS}
    rows = {}
    for row, runs in groups.items():
        first = runs[0]
        rows[row] = {
            "differs": first["differs"],
            "parameters": first["parameters"],
            "updates": first["updates"],
            "seeds": [run["seed"] for run in runs],
            "paper": vars(PAPER[row]),
        }
        for name in METRICS:
            rows[row][name] = _figures(row, name, values, spread[name])
    cost = {name: sum(run[name] or 0 for run in results) for name in COSTS}
    unknown = sum(None in (run["seconds"], run["target_tokens"]) for run in results)
    evaluated = {name: sorted({run[name] for run in results}) for name in ("metric", "signature", "averaged")}
    return {"rows": rows, "spread": spread, "cost": cost, "runs of unknown time": unknown, **evaluated}


def _pooled(groups: list[list[float]]) -> float | None:
    """Standard deviation within groups; `None` if no group has two values."""
    degrees_of_freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - mean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / degrees_of_freedom) if degrees_of_freedom else None


def _figures(row: str, name: str, values: dict, spread: float | None) -> dict:
    """Values, mean, spread and comparison with base of one metric in one row."""
    row_values, base = values[row][name], values.get("base", {}).get(name)
    figures = {
        "values": row_values,
        "mean": mean(row_values),
        "spread": stdev(row_values) if len(row_values) > 1 else None,
    }
    if row == "base" or base is None:
        return figures
    difference = mean(row_values) - mean(base)
    paper_difference = round(getattr(PAPER[row], name) - getattr(PAPER["base"], name), 2)
    error = None if spread is None else spread * math.sqrt(1 / len(row_values) + 1 / len(base))
    figures |= {"difference": difference, "standard_error": error, "paper_difference": paper_difference}
    return {**figures, "base": mean(base), "verdict": verdict(difference, error, paper_difference)}


def verdict(difference: float, error: float | None, paper_difference: float) -> str:
    """Compare a difference from base with the paper's, according to `RULE`.

    Args:
        difference (`float`): Difference of the means.
        error (`float`, *optional*): Standard error of the difference; `None` if unknown.
        paper_difference (`float`): The paper's difference.

    Returns:
        `str`: "agrees", "does not agree" or "within noise".

    >>> verdict(-1.0, 0.2, -0.9), verdict(-0.3, 0.2, -0.9), verdict(0.5, 0.2, -0.9), verdict(0.1, 0.2, 0.0)
    ('agrees', 'within noise', 'does not agree', 'agrees')
    """
    sign = 0 if abs(difference) <= 2 * (error or 0) else math.copysign(1, difference)
    if sign == (math.copysign(1, paper_difference) if paper_difference else 0):
        return AGREES
    return DISAGREES if sign else NOISE


# Markdown

HEADER = (
    *("row", "changes in the paper", "changes here", "updates", "parameters (M)", "seeds", "PPL", "BLEU"),
    *("paper: parameters (M)", "PPL", "BLEU", "PPL - base", "paper", "BLEU - base", "paper"),
)


def to_markdown(table: dict) -> str:
    """Format a `summary` as Markdown: the table, the agreement with the paper, and the cost."""
    rows = table["rows"]
    lines = ["# Table 3 beside the paper", "", *_how_evaluated(table), ""]
    lines += [_line(HEADER), _line(["---"] * len(HEADER))]
    lines += [_line(_cells(row, rows[row])) for row in rows]
    lines += ["", "± is the standard deviation over seeds.", "", "## Against the paper", ""]
    lines += _agreement(table)
    return "\n".join([*lines, "", "## Cost", "", _cost(table), ""])


def _how_evaluated(table: dict) -> list[str]:
    signature = f"{', '.join(table['metric'])} (`{', '.join(table['signature'])}`)"
    averaged = " or ".join(map(str, table["averaged"]))
    return [
        f"Here: perplexity per token and {signature} on the evaluation data, with the checkpoint's own beam search "
        f"(4 beams, α = 0.6) and weights averaged over the last {averaged} checkpoint(s). Paper: newstest2013, with "
        "the same search and without averaging. Perplexity and BLEU on different data are not comparable, but the "
        "differences from base are.",
    ]


def _line(cells) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _cells(row: str, entry: dict) -> list[str]:
    paper, base = entry["paper"], VaswaniConfig()
    cells = [row, _fields({name: value for name, value in TABLE_3[row].items() if value != getattr(base, name)})]
    cells += [_fields(entry["differs"]), f"{entry['updates']:,}"]
    cells += [f"{entry['parameters'] / 1e6:.2f}", str(len(entry["seeds"]))]
    cells += [_with_spread(entry[name]) for name in METRICS]
    cells += [paper["parameters"] or "", f"{paper['perplexity']:.2f}", f"{paper['bleu']:.1f}"]
    for name, digits in (("perplexity", 2), ("bleu", 1)):
        has_difference = "difference" in entry[name]
        cells += [f"{entry[name]['difference']:+.2f}" if has_difference else ""]
        cells += [f"{entry[name]['paper_difference']:+.{digits}f}" if has_difference else ""]
    return cells


def _fields(fields: dict) -> str:
    """
    >>> _fields({"encoder_layers": 2, "decoder_layers": 2, "num_heads": 4, "dropout": 0.0})
    'N 2, h 4, dropout 0.0'
    """
    fields = dict(fields)
    if "encoder_layers" in fields and fields["encoder_layers"] == fields.get("decoder_layers"):
        fields = {"N": fields.pop("encoder_layers")} | fields
        del fields["decoder_layers"]
    names = {"num_heads": "h", "label_smoothing": "label smoothing", "position_embedding": "positions"}
    return ", ".join(f"{names.get(name, name)} {value}" for name, value in fields.items())


def _with_spread(figures: dict) -> str:
    return f"{figures['mean']:.2f}" + ("" if figures["spread"] is None else f" ± {figures['spread']:.2f}")


def _agreement(table: dict) -> list[str]:
    rows = {row: entry for row, entry in table["rows"].items() if row != "base"}
    if "base" not in table["rows"]:
        return ["There is no finished run of base to compare with."]
    lines = [ONE_SEED if table["spread"]["bleu"] is None else RULE, ""]
    for name, short in METRICS.items():
        parts = []
        for kind in (AGREES, DISAGREES, NOISE):
            matching = [row for row, entry in rows.items() if entry[name]["verdict"] == kind]
            parts += [f"{kind} {len(matching)} ({', '.join(matching)})"] if matching else []
        lines += [f"- {short}, of {len(rows)} rows: {'; '.join(parts) or 'none to compare'}."]
    return lines


def _cost(table: dict) -> str:
    cost, runs = table["cost"], sum(len(entry["seeds"]) for entry in table["rows"].values())
    hours, evaluation = cost["seconds"] / 3600, cost["evaluation_seconds"] / 3600
    text = (
        f"Runs: {runs}; updates: {cost['updates']:,}; source tokens (with padding): {cost['source_tokens']:,}; target "
        f"tokens: {cost['target_tokens']:,}; hours of training: {hours:.2f}; of evaluation: {evaluation:.2f}."
    )
    unknown = table["runs of unknown time"]
    return text + (f" Runs with unknown time or target tokens, which are not included: {unknown}." if unknown else "")


# Figure


def draw(table: dict, output: Path) -> None:
    """Plot the differences from base beside the paper's: BLEU in points, perplexity in percent of base.

    Args:
        table (`dict`): A `summary` with base and at least one other row.
        output (`Path`): `.png` file to write.
    """
    from matplotlib.figure import Figure

    rows = {row: entry for row, entry in table["rows"].items() if row != "base"}
    figure = Figure(figsize=(10, 1.5 + 0.3 * len(rows)), layout="constrained")
    panels = (("bleu", "BLEU, difference from base"), ("perplexity", "perplexity, difference from base in %"))
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), panels):
        percent = name == "perplexity"
        scales = [100 / entry[name]["base"] if percent else 1 for entry in rows.values()]
        paper_scale = 100 / PAPER["base"].perplexity if percent else 1
        axes.errorbar(
            [entry[name]["difference"] * scale for entry, scale in zip(rows.values(), scales)],
            range(len(rows)),
            xerr=[2 * (entry[name]["standard_error"] or 0) * scale for entry, scale in zip(rows.values(), scales)],
            fmt="o",
            capsize=3,
            label="here, ± 2 standard errors",
        )
        paper_points = [entry[name]["paper_difference"] * paper_scale for entry in rows.values()]
        axes.plot(paper_points, range(len(rows)), "D", markerfacecolor="none", label="paper")
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set(title=title, yticks=range(len(rows)), yticklabels=list(rows))
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()  # shared by both panels
    axes.legend(frameon=False)
    save_whole(figure, output, dpi=120)


def write_table(folder: Path) -> str:
    """Write `table.md`, `table.json` and, if matplotlib is installed, `table.png` for all finished runs.

    Returns:
        `str`: Content of `table.md`.

    Raises:
        FileNotFoundError: The folder has no finished run.
    """
    with FileLock(folder / "table.lock"):
        table = summary(read_results(folder))
        text = to_markdown(table)
        write_whole(folder / "table.json", json.dumps(table, indent=2, allow_nan=False) + "\n")
        write_whole(folder / "table.md", text)
        if "base" in table["rows"] and len(table["rows"]) > 1 and find_spec("matplotlib"):
            draw(table, folder / "table.png")
    return text
