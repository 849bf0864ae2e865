"""The table of an ablation beside Table 3 of the paper, from the runs that are finished: Markdown, JSON, a picture."""

import json
import math
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypedDict

from filelock import FileLock

from hf_vaswani import TABLE_3, VaswaniConfig

from ..files import read_record, save_whole, write_whole
from ..paper import PAPER


RESULT = "result.json"  # of a finished run, in its folder ROW/seed-SEED
METRICS = {"perplexity": "PPL", "bleu": "BLEU"}
COSTS = ("updates", "source_tokens", "target_tokens", "seconds", "evaluation_seconds")
AGREES, DISAGREES, NOISE = "agrees", "does not agree", "within noise"
RULE = (
    "A difference from base counts if it is more than twice its standard error, `s * sqrt(1/n + 1/n_base)`, with "
    "n seeds and s the standard deviation over seeds, pooled over all rows. It *agrees* if it has the sign of the "
    "paper's, or if neither is a difference; it *does not agree* if it has the other sign, or the paper's is 0; it is "
    "*within noise* if it does not count where the paper has one."
)
ONE_SEED = "No row has two seeds, so the noise is unknown, and the sign alone is compared."


class ResultFile(TypedDict):
    """What `result.json` holds."""

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
    """The results of the finished runs in an ablation's folder, in the order of Table 3 and of the seeds.

    Raises:
        FileNotFoundError: There is none.
        ValueError: One is broken; the message names file and field.
    """
    results = [_read_result(path) for path in folder.glob(f"*/seed-*/{RESULT}")]
    if not results:
        raise FileNotFoundError(f"{folder}: no finished run, there is no ROW/seed-SEED/{RESULT} in it.")
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
    """Means over seeds, differences from base here and in the paper, and whether these agree.

    Args:
        results (`list[dict]`): As `hf-vaswani ablate` writes them, one a run.

    Returns:
        `rows`, by name; `spread`, the pooled standard deviation of each metric (`None`: no row has two seeds); `cost`,
        sums over all runs, of what is known; and how the runs were evaluated.
    """
    groups = defaultdict(list)
    for result in results:
        groups[result["row"]].append(result)
    values = {row: {name: [run[name] for run in runs] for name in METRICS} for row, runs in groups.items()}
    spread = {name: _pooled([of_row[name] for of_row in values.values()]) for name in METRICS}
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
    unknown = sum(run["seconds"] is None for run in results)
    evaluated = {name: sorted({run[name] for run in results}) for name in ("metric", "signature", "averaged")}
    return {"rows": rows, "spread": spread, "cost": cost, "runs of unknown time": unknown, **evaluated}


def _pooled(groups: list[list[float]]) -> float | None:
    """Standard deviation within groups; `None` where none has two values."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - mean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / freedom) if freedom else None


def _figures(row: str, name: str, values: dict, spread: float | None) -> dict:
    """Of one row and metric: the values, their mean and spread, and the comparison with base."""
    own, base = values[row][name], values.get("base", {}).get(name)
    figures = {"values": own, "mean": mean(own), "spread": stdev(own) if len(own) > 1 else None}
    if row == "base" or base is None:
        return figures
    here = mean(own) - mean(base)
    paper = round(getattr(PAPER[row], name) - getattr(PAPER["base"], name), 2)
    error = None if spread is None else spread * math.sqrt(1 / len(own) + 1 / len(base))
    figures |= {"difference": here, "standard_error": error, "paper_difference": paper, "base": mean(base)}
    return {**figures, "verdict": verdict(here, error, paper)}


def verdict(here: float, error: float | None, paper: float) -> str:
    """Whether a difference from base has the paper's sign, by `RULE`.

    Args:
        here (`float`): Difference of the means.
        error (`float`, *optional*): Its standard error, if it is known.
        paper (`float`): The paper's difference.

    >>> verdict(-1.0, 0.2, -0.9), verdict(-0.3, 0.2, -0.9), verdict(0.5, 0.2, -0.9), verdict(0.1, 0.2, 0.0)
    ('agrees', 'within noise', 'does not agree', 'agrees')
    """
    sign = 0 if abs(here) <= 2 * (error or 0) else math.copysign(1, here)
    if sign == (math.copysign(1, paper) if paper else 0):
        return AGREES
    return DISAGREES if sign else NOISE


# Markdown

HEADER = (
    *("row", "changed in the paper", "here", "updates", "parameters (M)", "seeds", "PPL", "BLEU"),
    *("paper: parameters (M)", "PPL", "BLEU", "PPL - base", "paper", "BLEU - base", "paper"),
)


def to_markdown(found: dict) -> str:
    """The table, what agrees with the paper, and what it cost, of a `summary`."""
    rows = found["rows"]
    lines = ["# Table 3, here and in the paper", "", *_how_evaluated(found), ""]
    lines += [_line(HEADER), _line(["---"] * len(HEADER))]
    lines += [_line(_cells(row, rows[row])) for row in rows]
    lines += ["", "± is the standard deviation over seeds.", "", "## Against the paper", ""]
    lines += _agreement(found)
    return "\n".join([*lines, "", "## Cost", "", _cost(found), ""])


def _how_evaluated(found: dict) -> list[str]:
    signature = f"{', '.join(found['metric'])} (`{', '.join(found['signature'])}`)"
    averaged = " or ".join(map(str, found["averaged"]))
    return [
        f"Here: perplexity per token of the evaluation data, and its {signature} by the checkpoint's own beam search "
        f"(4 beams, α = 0.6); weights averaged over the last {averaged} checkpoint(s). Paper: newstest2013, the same "
        "search, no averaging. Perplexities and BLEU of different data cannot be compared, differences from base can.",
    ]


def _line(cells) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _cells(row: str, entry: dict) -> list[str]:
    paper, base = entry["paper"], VaswaniConfig()
    cells = [row, _fields({name: value for name, value in TABLE_3[row].items() if value != getattr(base, name)})]
    cells += [_fields(entry["differs"]), f"{entry['updates']:,}"]
    cells += [f"{entry['parameters'] / 1e6:.2f}", len(entry["seeds"])]
    cells += [_with_spread(entry[name]) for name in METRICS]
    cells += [paper["parameters"] or "", f"{paper['perplexity']:.2f}", f"{paper['bleu']:.1f}"]
    for name, digits in (("perplexity", 2), ("bleu", 1)):
        known = "difference" in entry[name]
        cells += [f"{entry[name]['difference']:+.2f}" if known else ""]
        cells += [f"{entry[name]['paper_difference']:+.{digits}f}" if known else ""]
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


def _agreement(found: dict) -> list[str]:
    rows = {row: entry for row, entry in found["rows"].items() if row != "base"}
    if "base" not in found["rows"]:
        return ["There is no finished run of base to compare with."]
    lines = [ONE_SEED if found["spread"]["bleu"] is None else RULE, ""]
    for name, short in METRICS.items():
        of = {kind: [row for row in rows if rows[row][name]["verdict"] == kind] for kind in (AGREES, DISAGREES, NOISE)}
        parts = [f"{kind} {len(named)} ({', '.join(named)})" for kind, named in of.items() if named]
        lines += [f"- {short}, of {len(rows)} rows: {'; '.join(parts) or 'none to compare'}."]
    return lines


def _cost(found: dict) -> str:
    cost, runs = found["cost"], sum(len(entry["seeds"]) for entry in found["rows"].values())
    hours, evaluation = cost["seconds"] / 3600, cost["evaluation_seconds"] / 3600
    text = (
        f"Runs: {runs}; updates: {cost['updates']:,}; source tokens (with padding): {cost['source_tokens']:,}; target "
        f"tokens: {cost['target_tokens']:,}; hours of training: {hours:.2f}; of evaluation: {evaluation:.2f}."
    )
    unknown = found["runs of unknown time"]
    return text + (f" Runs whose time and target tokens are not known nor counted: {unknown}." if unknown else "")


# Picture


def draw(found: dict, output: Path) -> None:
    """A picture of the differences from base, here and in the paper: BLEU, and perplexity in percent of base's.

    Args:
        found (`dict`): A `summary` with base and at least one other row.
        output (`Path`): Picture to write, `.png`.
    """
    from matplotlib.figure import Figure

    rows = {row: entry for row, entry in found["rows"].items() if row != "base"}
    figure = Figure(figsize=(10, 1.5 + 0.3 * len(rows)), layout="constrained")
    panels = (("bleu", "BLEU, difference from base"), ("perplexity", "perplexity, difference from base in %"))
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), panels):
        percent = name == "perplexity"
        here = [100 / entry[name]["base"] if percent else 1 for entry in rows.values()]
        paper = 100 / PAPER["base"].perplexity if percent else 1
        axes.errorbar(
            [entry[name]["difference"] * unit for entry, unit in zip(rows.values(), here)],
            range(len(rows)),
            xerr=[2 * (entry[name]["standard_error"] or 0) * unit for entry, unit in zip(rows.values(), here)],
            fmt="o",
            capsize=3,
            label="here, ± 2 standard errors",
        )
        values = [entry[name]["paper_difference"] * paper for entry in rows.values()]
        axes.plot(values, range(len(rows)), "D", markerfacecolor="none", label="paper")
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set(title=title, yticks=range(len(rows)), yticklabels=list(rows))
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()  # the panels share it
    axes.legend(frameon=False)
    save_whole(figure, output, dpi=120)


def write_table(folder: Path) -> str:
    """Writes `table.md`, `table.json` and, where matplotlib is installed, `table.png`, of all finished runs.

    Returns:
        `str`: The Markdown.

    Raises:
        FileNotFoundError: No run is finished.
    """
    with FileLock(folder / "table.lock"):
        found = summary(read_results(folder))
        text = to_markdown(found)
        write_whole(folder / "table.json", json.dumps(found, indent=2) + "\n")
        write_whole(folder / "table.md", text)
        if "base" in found["rows"] and len(found["rows"]) > 1 and find_spec("matplotlib"):
            draw(found, folder / "table.png")
    return text
