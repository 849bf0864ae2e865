"""Latency of single sentences, and its distance to the limit that memory sets.

Every step of decoding reads all weights of the decoder and the output projection once. A sentence of `n` tokens, end
token included, has `n` steps. The share of the memory limit is the time that these bytes alone need at the measured
bandwidth, divided by the measured time. Caches that hold all weights can be faster than this limit.
"""

import contextlib
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from .systems import BEAMS, load


SEARCHES = {"greedy": 1, f"beam{BEAMS}": BEAMS}
FIXED = "fixed_weights"  # suffix of a row of this package with packed weights

Turn = dict[str, tuple[list[float], list[str]]]  # by search: seconds and texts of all sentences


def latency_rows(systems: list[str]) -> list[str]:
    """Rows of the table: the systems, and this package's with packed weights too."""
    return [row for name in systems for row in ((name, f"{name} {FIXED}") if name.startswith("ours") else (name,))]


def translate_singly(row: str, root: Path, threads: int, sentences: list[list[int]]) -> Turn:
    """Translate sentences one at a time by every search, on all threads."""
    torch.set_num_threads(threads)
    name, _, suffix = row.partition(" ")
    system = load(name, root)
    results: Turn = {}
    with system.fixed_weights() if suffix else contextlib.nullcontext():
        for search, beams in SEARCHES.items():
            for sentence in sentences[:2]:
                system.single(sentence, beams)
            seconds, texts = results[search] = [], []
            for sentence in sentences:
                start = time.perf_counter()
                texts.append(system.single(sentence, beams))
                seconds.append(time.perf_counter() - start)
    return results


def summary(turns: list[tuple[list[float], int]], step_bytes: int, rate: float) -> dict:
    """Figures of one system and search.

    Args:
        turns (`list`): Seconds of all sentences, and number of steps of all of them together, of each turn.
        step_bytes (`int`): Bytes of weights that a step reads.
        rate (`float`): Bytes that memory gives in a second.

    Returns:
        `dict`: `p50` and `p95` in milliseconds, as medians of all turns, the range of `p50`, and
        `share_of_memory_limit`.
    """
    p50, p95 = ([1000 * float(np.percentile(seconds, q)) for seconds, _ in turns] for q in (50, 95))
    shares = [steps * step_bytes / rate / sum(seconds) for seconds, steps in turns]
    return {
        "p50": round(statistics.median(p50), 1),
        "p95": round(statistics.median(p95), 1),
        "p50_range": [round(min(p50), 1), round(max(p50), 1)],
        "share_of_memory_limit": round(statistics.median(shares), 3),
    }


def latency_ratios(latencies: dict[str, dict]) -> dict:
    """Ratio of MarianMT's median latency to that of this package with packed weights, by type and search."""
    ratios = {}
    for dtype in ("float32", "bfloat16"):
        ours, marian = (latencies.get(row) for row in (f"ours-{dtype} {FIXED}", f"marian-{dtype}"))
        if ours and marian:
            ratios[dtype] = {search: round(marian[search]["p50"] / ours[search]["p50"], 2) for search in SEARCHES}
    return ratios
