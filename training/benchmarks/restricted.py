"""Benchmark full and restricted self-attention against sentence length: Table 1, measured.

    python -m training.benchmarks.restricted

Measured is one self-attention of the base model in a sentence of `n` random tokens, in float32 on a CPU, without the
four projections: its mask, scores, softmax and weighted sum. "full" sees all positions. "restricted" sees a
neighbourhood of `r`, as a model with `attention_window` computes it, "masked" the same by a mask over all `n²` scores.
The counts of Table 1, `n² · d` and `r · n · d`, stand beside them.

Time is the median of `--repeats` calls, as CPU time of the process and, in brackets, by the clock. Memory is by how
much the peak resident size of a process of its own grows. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from functools import partial

import torch
from torch import nn
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    sliding_window_bidirectional_overlay,
)

from hf_vaswani import VaswaniConfig
from hf_vaswani.modeling_vaswani import VaswaniAttention
from hf_vaswani.window_vaswani import restricted

from .memory import peak_memory


LENGTHS = (16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096)
KINDS = ("full", "masked", "restricted")


class SelfAttention:
    """One self-attention of the base model, without its projections.

    Args:
        kind (`str`): One of `KINDS`.
        window (`int`): Size of the neighbourhood, `r`.
        is_causal (`bool`): The decoder's instead of the encoder's.
    """

    def __init__(self, kind: str, window: int, is_causal: bool):
        self.config = VaswaniConfig(attn_implementation="sdpa", attention_window=window)
        self.module = VaswaniAttention(self.config, layer_idx=0, is_causal=is_causal)
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.module, projection, nn.Identity())
        self.create_mask = create_causal_mask if is_causal else create_bidirectional_mask
        if kind == "masked":
            near = sliding_window_bidirectional_overlay(window // 2)
            self.create_mask = partial(self.create_mask, and_mask_function=near)
        if kind == "restricted":
            self.create_mask = restricted(self.create_mask, window // 2)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`states` and the result: `(batch, length, d_model)`."""
        return self.module(states, self.create_mask(self.config, states, None, past_key_values=None))[0]


def measure(connection, kind: str, length: int, args: argparse.Namespace) -> None:
    """Send the CPU seconds, clock seconds and bytes of one attention to a connection."""
    torch.set_num_threads(args.threads)
    attention = SelfAttention(kind, args.window, args.side == "decoder")
    states = torch.randn(1, length, attention.config.d_model, requires_grad=args.training)

    def call() -> None:
        with torch.set_grad_enabled(args.training):
            outputs = attention(states)
        if args.training:
            outputs.sum().backward()

    before = peak_memory(states.device)
    call()
    memory = peak_memory(states.device) - before
    times = []
    for _ in range(args.repeats):
        cpu, clock = time.process_time(), time.perf_counter()
        call()
        times.append((time.process_time() - cpu, time.perf_counter() - clock))
    connection.send((*map(statistics.median, zip(*times)), memory))


def measure_apart(kind: str, length: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one attention in a process of its own."""
    context = multiprocessing.get_context("fork")  # which has the libraries in memory already
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(sender, kind, length, args))
    process.start()
    sender.close()
    cpu, clock, memory = receiver.recv()
    process.join()
    return {
        "cpu_ms": round(1000 * cpu, 3),
        "clock_ms": round(1000 * clock, 3),
        "memory_mb": round(memory / 2**20, 1),
    }


def counts(length: int, window: int, d_model: int) -> tuple[int, int]:
    """Table 1's complexity per layer: `n² · d` of full and `r · n · d` of restricted self-attention."""
    return length**2 * d_model, window * length * d_model


def table(results: dict[int, dict[str, dict[str, float]]], window: int, d_model: int) -> str:
    """Markdown table of all measurements."""
    heads = [f"{kind}, ms" for kind in KINDS] + [f"{kind}, MB" for kind in KINDS]
    rows = [["n", "n² · d", f"r · n · d, r = {window}", *heads], ["---:"] * (3 + len(heads))]
    for length, found in results.items():
        operations = [f"{count / 1e6:,.1f} M" for count in counts(length, window, d_model)]
        times = [f"{found[kind]['cpu_ms']:,.2f} ({found[kind]['clock_ms']:,.2f})" for kind in KINDS]
        rows.append([f"{length:,}", *operations, *times, *(f"{found[kind]['memory_mb']:,.1f}" for kind in KINDS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.restricted`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the sentence (16 to 4096)")
    parser.add_argument("--window", type=int, default=64, help="size of the neighbourhood, r (%(default)s)")
    parser.add_argument("--side", choices=("encoder", "decoder"), default="encoder", help="stack (%(default)s)")
    parser.add_argument("--training", action="store_true", help="measure the gradients too")
    parser.add_argument("--threads", type=int, default=1, help="threads (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="measured calls (%(default)s)")
    args = parser.parse_args(argv)
    results = {length: {kind: measure_apart(kind, length, args) for kind in KINDS} for length in args.lengths}
    print(table(results, args.window, VaswaniConfig().d_model))
    print(json.dumps({**vars(args), "results": results}))


if __name__ == "__main__":
    main()
