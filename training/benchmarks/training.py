"""Training of a model of the same size by this package, and by MarianMT under transformers' stock `Seq2SeqTrainer`.

    python -m training.benchmarks.training --train-files train.en train.de
    python -m training.benchmarks.training --lengths

Every system is a process of its own and trains by its Trainer, with label smoothing, Adam and, for bfloat16, autocast.
An update has the same number of target tokens for all: this package fills budgets of tokens, of `--part-tokens` at a
time, the stock Trainer takes as many pairs as have so many tokens on average, at random or grouped by length.
Repetitions are interleaved, after some updates that are not measured; medians are reported with the range. Rates count
target tokens without padding. MFU is the share of the rate of `torch.mm`, measured in between, that the real tokens'
matrix products are done at. Where this package has its products from a faster library (`training/products.py`), that
library's own rate is reported beside it.
With `--compile`, this package's model is compiled; the figures say into how many graphs, how many of them because none
fitted, and in how many seconds. What is compiled after the first update counts as training.

With `--lengths`: time of a forward pass and of a training step against the length of the sentences, at the same number
of tokens (Table 1 of the paper). The last line is one JSON object.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from datasets import Dataset
from torch._dynamo.utils import get_compilation_metrics
from torch.nn import functional as F
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..arguments import VaswaniTrainingArguments
from ..cli import KERNELS
from ..data import load_pairs, tokenize
from ..products import OneDNNProducts
from ..tokenizer import train_tokenizer
from ..trainer import VaswaniTrainer
from .memory import peak_memory
from .peers import marian_like


SIZES = {
    "tiny": {
        "d_model": 128,
        "d_ff": 256,
        "num_heads": 4,
        "d_k": 32,
        "d_v": 32,
        "encoder_layers": 4,
        "decoder_layers": 4,
    },
    "base": {},
    "base-37k": {"vocab_size": 37000},
}
SYSTEMS = ("ours", "marian-random", "marian-grouped")
LENGTHS = [2**power for power in range(4, 13)]


def device() -> torch.device:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def now() -> float:
    """Seconds, when all that was begun on the device is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def matrix_product_rate(dtype: torch.dtype, product: Callable = torch.mm) -> float:
    """Operations a second of the best of several products of square matrices."""
    size = 8192 if torch.accelerator.is_available() else 2048
    left, right = torch.randn(2, size, size, device=device(), dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = now()
        product(left, right)
        best = min(best, now() - start)
    return 2 * size**3 / best


def operations(config: VaswaniConfig, source: int, target: int) -> int:
    """Of a training step's matrix products on so many tokens: 2 a weight forward and 4 backward, without the products
    of queries and keys, which are less than a hundredth for short sentences."""
    attention = config.d_model * config.num_heads * 2 * (config.d_k + config.d_v)
    feed_forward = 2 * config.d_model * config.d_ff
    per_source = config.encoder_layers * (attention + feed_forward) + config.decoder_layers * attention // 2
    per_target = config.decoder_layers * (attention + attention // 2 + feed_forward)
    return 6 * (source * per_source + target * (per_target + config.d_model * config.vocab_size))


@dataclass
class Counts:
    """What went into updates: tokens, and places with padding."""

    source: int = 0
    target: int = 0
    places: int = 0

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        self.source += int(batch["attention_mask"].sum())
        self.target += int((batch["labels"] != -100).sum())
        self.places += batch["attention_mask"].numel() + batch["labels"].numel()


class Over(Exception):
    """The benchmark is over."""


class Stepper(TrainerCallback):
    """Lets a Trainer make so many updates whenever it is told to, and reports their time and contents."""

    def __init__(self, connection):
        self.connection, self.left = connection, 0

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.left:
            self.left = self.connection.recv()
            if not self.left:
                raise Over
            self.counts, self.start = Counts(), now()

    def on_step_end(self, args, state, control, **kwargs):
        self.left -= 1
        if not self.left:
            self.connection.send((now() - self.start, self.counts))


def counting(trainer_class: type, stepper: Stepper) -> type:
    """A Trainer that shows every batch to the stepper."""

    class Counting(trainer_class):
        def training_step(self, model, inputs, *args, **kwargs):
            stepper.counts.add(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting


def make_trainer(system: str, config: VaswaniConfig, dataset: Dataset, tokenizer, args, stepper: Stepper):
    """The Trainer of a system, for updates without end."""
    common = {"max_steps": 10**6, "report_to": "none", "save_strategy": "no", "bf16": args["dtype"] == "bfloat16"}
    common |= {"eval_strategy": "no", "logging_steps": 10**6, "output_dir": args["folder"], "disable_tqdm": True}
    common |= {"use_cpu": not torch.accelerator.is_available()}
    torch.manual_seed(0)
    if system == "ours":
        tokens = {"source_tokens_per_update": args["tokens"], "target_tokens_per_update": args["tokens"]}
        tokens |= {"tokens_per_device": args["part"]}
        arguments = VaswaniTrainingArguments(**common, **tokens, learning_rate=1e-4, torch_compile=args["compile"])
        return counting(VaswaniTrainer, stepper)(
            VaswaniForConditionalGeneration(config),
            arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[stepper],
        )
    model = marian_like(config, max_positions=512)
    arguments = Seq2SeqTrainingArguments(
        **common,
        per_device_train_batch_size=args["pairs"],
        train_sampling_strategy="group_by_length" if system == "marian-grouped" else "random",
        label_smoothing_factor=config.label_smoothing,
        learning_rate=1e-4,
    )
    return counting(Seq2SeqTrainer, stepper)(
        model,
        arguments,
        train_dataset=dataset.select_columns(["input_ids", "labels"]),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=[stepper],
    )


def compilations() -> dict:
    """What `torch.compile` has done in this process: graphs, those that were needed because none fitted, seconds."""
    metrics = get_compilation_metrics()
    return {
        "graphs": len(metrics),
        "recompilations": sum(one.recompile_reason is not None for one in metrics),
        "compile_seconds": round(sum(one.duration_us or 0 for one in metrics) / 1e6, 1),
    }


def work(connection, system: str, config: VaswaniConfig, dataset: Dataset, tokenizer, args: dict) -> None:
    """A system's process."""
    if system == "ours":
        os.environ.update(KERNELS)  # as `hf-vaswani train` does
    torch.set_num_threads(args["threads"])
    stepper = Stepper(connection)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(system, config, dataset, tokenizer, {**args, "folder": folder}, stepper)
        try:
            trainer.train()
        except Over:
            connection.send((peak_memory(device()), compilations() if args["compile"] and system == "ours" else {}))


def read_data(files: list[str]) -> tuple[Dataset, object]:
    """Pairs as token ids, and their vocabulary of 10,000."""
    pairs = load_pairs(files, "source", "target")
    tokenizer = train_tokenizer((text for pair in pairs for text in pair.values()), vocab_size=10_000)
    return tokenize(pairs, tokenizer), tokenizer


def train_all(args: argparse.Namespace, size: str, dtype: str, dataset: Dataset, tokenizer) -> dict:
    """All systems at one size in one precision, interleaved: seconds, counts and peak memory of each."""
    config = VaswaniConfig(**{"vocab_size": len(tokenizer), **SIZES[size]})
    pairs = round(args.tokens * len(dataset) / sum(map(len, dataset["labels"])))
    options = {"dtype": dtype, "tokens": args.tokens, "pairs": pairs, "threads": args.threads}
    options |= {"compile": args.compile}
    options["part"] = min(args.part_tokens, args.tokens)
    context = multiprocessing.get_context("spawn")
    connections, found = {}, {system: {"runs": []} for system in args.systems}
    for system in args.systems:
        connections[system], theirs = context.Pipe()
        inputs = (theirs, system, config, dataset, tokenizer, options)
        context.Process(target=work, args=inputs, daemon=True).start()
        connections[system].send(args.warm_up)
        connections[system].recv()
    rates, linear_rates = [], []
    for _ in range(args.repeats):
        rates.append(matrix_product_rate(getattr(torch, dtype)))
        with OneDNNProducts():
            linear_rates.append(matrix_product_rate(getattr(torch, dtype), F.linear))
        for system, connection in connections.items():
            connection.send(args.updates)
            found[system]["runs"].append(connection.recv())
    for system, connection in connections.items():
        connection.send(0)
        found[system]["memory"], found[system]["compiled"] = connection.recv()
    rate = statistics.median(rates)
    measured = {system: summary(found[system], config, rate) for system in args.systems}
    if "ours" in measured:
        measured["ours"]["linear_gflops"] = round(statistics.median(linear_rates) / 1e9)
    return measured


def summary(found: dict, config: VaswaniConfig, rate: float) -> dict:
    """Figures of a system at one size in one precision; `rate` the machine's operations a second."""
    speeds = sorted(counts.target / seconds for seconds, counts in found["runs"])
    shares = [operations(config, c.source, c.target) / seconds / rate for seconds, c in found["runs"]]
    places = sum(counts.places for _, counts in found["runs"])
    return {
        "target_tokens_per_second": round(statistics.median(speeds), 1),
        "range": [round(speeds[0], 1), round(speeds[-1], 1)],
        "mfu": round(statistics.median(shares), 3),
        "padding_share": round(1 - sum(c.source + c.target for _, c in found["runs"]) / places, 4),
        "peak_memory_mb": round(found["memory"] / 2**20),
        "matrix_products_gflops": round(rate / 1e9),
        **found["compiled"],
    }


def ratios(results: dict[str, dict]) -> dict:
    """This package's rate over a peer's, and its memory."""
    found = {}
    for peer in (system for system in results if "ours" in results and system != "ours"):
        ours, theirs = results["ours"], results[peer]
        found[f"speed_vs_{peer}"] = round(ours["target_tokens_per_second"] / theirs["target_tokens_per_second"], 2)
        found[f"memory_vs_{peer}"] = round(ours["peak_memory_mb"] / theirs["peak_memory_mb"], 2)
    return found


def step_times(model: PreTrainedModel, length: int, tokens: int, dtype: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a forward pass and of a step with its gradients, at `tokens` tokens in sentences of `length`;
    this package's model as its Trainer runs it, without keeping the logits."""
    ids = torch.randint(3, model.config.vocab_size, (max(1, tokens // length), length), device=model.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    is_ours = isinstance(model, VaswaniForConditionalGeneration)
    if is_ours:
        batch["skip_logits"] = True
    times: dict[str, list[float]] = {"forward": [], "step": []}
    for _ in range(repeats + 1):
        for name, seconds in times.items():
            start = now()
            with (
                torch.set_grad_enabled(name == "step"),
                torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16"),
                OneDNNProducts() if is_ours else contextlib.nullcontext(),
            ):
                loss = model(**batch).loss
            if name == "step":
                loss.backward()
                model.zero_grad()
            seconds.append(1000 * (now() - start))
    return {name: round(statistics.median(seconds[1:]), 1) for name, seconds in times.items()}


def measure_lengths(args: argparse.Namespace) -> dict:
    """Times against length, of both models at each size of `args.sizes` but the tokenizer's vocabulary."""
    torch.set_num_threads(args.threads)
    found: dict = {}
    for size, dtype in product(args.sizes, args.dtypes):
        config = VaswaniConfig(**{"vocab_size": 10_000, **SIZES[size]})
        models = {"ours": VaswaniForConditionalGeneration(config), "marian": marian_like(config, LENGTHS[-1])}
        for length in LENGTHS:
            for system, model in models.items():
                times = step_times(model.to(device()).train(), length, args.tokens, dtype, args.repeats)
                found.setdefault(f"{size}-{dtype}", {}).setdefault(system, {})[length] = times
                print(f"{size} {dtype} {system:<7} n = {length:>4}: {times}", flush=True)
    return found


def length_ratios(found: dict) -> dict:
    """The peer's times over this package's, at each length."""
    return {
        name: {
            length: {what: round(models["marian"][length][what] / time, 2) for what, time in times.items()}
            for length, times in models["ours"].items()
        }
        for name, models in found.items()
    }


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.training`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--train-files", nargs="+", help="sentence pairs: two text files, or one .tsv, .jsonl, .parquet"
    )
    parser.add_argument("--lengths", action="store_true", help="time against length instead")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--tokens", type=int, default=4096, help="target tokens of an update (%(default)s)")
    parser.add_argument("--part-tokens", type=int, default=2048, help="of this package's batches (%(default)s)")
    parser.add_argument("--updates", type=int, default=3, help="of a repetition (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="updates that are not measured (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile this package's model by torch.compile")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.warm_up < 1:
        parser.error(f"--warm-up must be at least 1, got {args.warm_up}")
    if args.lengths:
        found = measure_lengths(args)
        options = {"threads": args.threads, "tokens": args.tokens}
        print(json.dumps({**options, "milliseconds": found, "speed_vs_marian": length_ratios(found)}))
        return
    if not args.train_files:
        parser.error("--train-files or --lengths is needed")
    torch.set_num_threads(args.threads)
    dataset, tokenizer = read_data(args.train_files)
    results = {}
    for size, dtype in product(args.sizes, args.dtypes):
        measured = train_all(args, size, dtype, dataset, tokenizer)
        for system, figures in measured.items():
            print(f"{size} {dtype} {system:<15} {figures}", flush=True)
        results[f"{size}-{dtype}"] = {"systems": measured, **ratios(measured)}
    options = {"threads": args.threads, "tokens": args.tokens, "part_tokens": args.part_tokens}
    print(json.dumps({**options, "results": results}))


if __name__ == "__main__":
    main()
