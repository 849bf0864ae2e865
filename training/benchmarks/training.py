"""Benchmark training by this package, and by MarianMT of the same size with transformers' `Seq2SeqTrainer`.

    python -m training.benchmarks.training --train-files train.en train.de
    python -m training.benchmarks.training --lengths

Each system trains in a process of its own by its Trainer, with label smoothing, Adam and, for bfloat16, autocast. An
update has the same number of target tokens in all systems. This package fills token budgets in batches of
`--part-tokens`. The stock Trainer uses the number of pairs with that many tokens on average, shuffled or grouped by
length. joeynmt and EOLE train where they are installed, on this package's batches, with `torch.optim.Adam`
(`toolkits.py`); the others are skipped with a reason. Repetitions are interleaved after a warm-up, and medians are
reported with the range. Throughput counts target tokens without padding. MFU is the rate of matrix product operations
on real tokens, divided by the rate of `torch.mm`, which is measured between repetitions. The rate of
`torch.nn.functional.linear` is reported beside it, because this package may run it by a faster library
(`trainer/onednn.py`).

With `--compile`, this package's model is compiled. The number of graphs, the number of recompilations and the
compilation time are reported. Compilation after the warm-up counts as training time.

With `--lengths`, measure the time of a forward pass and of a training step against sentence length, at a constant
number of tokens (Table 1 of the paper). The last line is one JSON object.
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
from itertools import islice, product

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

from ..data.encoding import tokenize
from ..data.pairs import load_pairs
from ..data.tokenizer import train_tokenizer
from ..settings import TRAINING_KERNELS
from ..trainer.arguments import VaswaniTrainingArguments
from ..trainer.onednn import OneDNNProducts
from ..trainer.trainer import VaswaniTrainer
from .memory import peak_memory
from .peers import marian_like
from .toolkits import TOOLKITS, update, updates


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
SYSTEMS = ("ours", "marian-random", "marian-grouped", *TOOLKITS)
LENGTHS = [2**power for power in range(4, 13)]


def device() -> torch.device:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def now() -> float:
    """Time in seconds, after synchronising with the device."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def matrix_product_rate(dtype: torch.dtype, product: Callable = torch.mm) -> float:
    """Best rate of several products of square matrices, in operations per second."""
    size = 8192 if torch.accelerator.is_available() else 2048
    left, right = torch.randn(2, size, size, device=device(), dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = now()
        product(left, right)
        best = min(best, now() - start)
    return 2 * size**3 / best


def operations(config: VaswaniConfig, source: int, target: int) -> int:
    """Matrix product operations of a training step on `source` and `target` tokens.

    They are 2 per weight and token in the forward pass and 4 in the backward pass. The products of queries, keys and
    values with each other are left out: they are less than 1% for short sentences.
    """
    attention = config.d_model * config.num_heads * 2 * (config.d_k + config.d_v)
    feed_forward = 2 * config.d_model * config.d_ff
    per_source = config.encoder_layers * (attention + feed_forward) + config.decoder_layers * attention // 2
    per_target = config.decoder_layers * (attention + attention // 2 + feed_forward)
    return 6 * (source * per_source + target * (per_target + config.d_model * config.vocab_size))


@dataclass
class Counts:
    """Source and target tokens of updates, and positions including padding."""

    source: int = 0
    target: int = 0
    places: int = 0

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        self.source += int(batch["attention_mask"].sum())
        self.target += int((batch["labels"] != -100).sum())
        self.places += batch["attention_mask"].numel() + batch["labels"].numel()


class BenchmarkDone(Exception):
    """Raised to leave the training loop when the benchmark is done."""


class Stepper(TrainerCallback):
    """Run the number of updates received from the connection, and send back their time and counts."""

    def __init__(self, connection):
        self.connection, self.left = connection, 0

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.left:
            self.left = self.connection.recv()
            if not self.left:
                raise BenchmarkDone
            self.counts, self.start = Counts(), now()

    def on_step_end(self, args, state, control, **kwargs):
        self.left -= 1
        if not self.left:
            self.connection.send((now() - self.start, self.counts))


def counting(trainer_class: type, stepper: Stepper) -> type:
    """Subclass a Trainer to count the tokens of every batch."""

    class Counting(trainer_class):
        def training_step(self, model, inputs, *args, **kwargs):
            stepper.counts.add(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting


def make_trainer(system: str, config: VaswaniConfig, dataset: Dataset, tokenizer, args, stepper: Stepper):
    """Create the Trainer of a system, with a practically unlimited number of updates."""
    common = {"max_steps": 10**6, "report_to": "none", "save_strategy": "no", "bf16": args["dtype"] == "bfloat16"}
    common |= {"eval_strategy": "no", "logging_steps": 10**6, "output_dir": args["folder"], "disable_tqdm": True}
    common |= {"use_cpu": not torch.accelerator.is_available()}
    torch.manual_seed(0)
    if system == "ours":
        tokens = {"source_tokens_per_update": args["tokens"], "target_tokens_per_update": args["tokens"]}
        tokens |= {"tokens_per_device": args["part_tokens"]}
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
    """Graphs, recompilations and seconds of `torch.compile` in this process."""
    metrics = get_compilation_metrics()
    return {
        "graphs": len(metrics),
        "recompilations": sum(graph.recompile_reason is not None for graph in metrics),
        "compile_seconds": round(sum(graph.duration_us or 0 for graph in metrics) / 1e6, 1),
    }


def work(connection, system: str, config: VaswaniConfig, dataset: Dataset, tokenizer, args: dict) -> None:
    """Train on command in a process of its own, and finally send its peak memory and compilations."""
    if system == "ours":
        os.environ.update(TRAINING_KERNELS)  # as `hf-vaswani train` does
    torch.set_num_threads(args["threads"])
    stepper = Stepper(connection)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(system, config, dataset, tokenizer, {**args, "folder": folder}, stepper)
        try:
            trainer.train()
        except BenchmarkDone:
            connection.send((peak_memory(device()), compilations() if args["compile"] and system == "ours" else {}))


def work_toolkit(connection, system: str, config: VaswaniConfig, dataset: Dataset, tokenizer, args: dict) -> None:
    """As `work`, for another toolkit's model. Send a reason instead of the first figures if it is not installed."""
    torch.set_num_threads(args["threads"])
    torch.manual_seed(0)
    left = connection.recv()
    try:
        model = TOOLKITS[system](config).to(device()).train()
    except ImportError as error:
        connection.send(str(error))
        return
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    source = updates(dataset, tokenizer, args["tokens"], args["part_tokens"])
    while left:
        counts, start = Counts(), now()
        for batches in islice(source, left):
            for batch in batches:
                counts.add(batch)
            update(model, optimizer, batches, args["dtype"])
        connection.send((now() - start, counts))
        left = connection.recv()
    connection.send((peak_memory(device()), {}))


def read_data(files: list[str]) -> tuple[Dataset, object]:
    """Read and tokenise sentence pairs. The tokenizer is trained on them, with a vocabulary of 10,000."""
    pairs = load_pairs(files, "source", "target")
    tokenizer = train_tokenizer((text for pair in pairs for text in pair.values()), vocab_size=10_000)
    return tokenize(pairs, tokenizer), tokenizer


def train_all(
    args: argparse.Namespace, size: str, dtype: str, dataset: Dataset, tokenizer
) -> tuple[dict[str, dict], dict[str, str]]:
    """Measure all systems at one size and precision with interleaved repetitions.

    Returns:
        The figures by system, and the reasons for which others were skipped.
    """
    config = VaswaniConfig(**{"vocab_size": len(tokenizer), **SIZES[size]})
    pairs = round(args.tokens * len(dataset) / sum(map(len, dataset["labels"])))
    options = {"dtype": dtype, "tokens": args.tokens, "pairs": pairs, "threads": args.threads}
    options |= {"compile": args.compile}
    options["part_tokens"] = min(args.part_tokens, args.tokens)
    context = multiprocessing.get_context("spawn")
    connections, measurements, skipped = {}, {}, {}
    for system in args.systems:
        connection, worker_connection = context.Pipe()
        inputs = (worker_connection, system, config, dataset, tokenizer, options)
        target = work_toolkit if system in TOOLKITS else work
        context.Process(target=target, args=inputs, daemon=True).start()
        connection.send(args.warm_up)
        if isinstance(answer := connection.recv(), str):
            skipped[system] = answer
        else:
            connections[system], measurements[system] = connection, {"runs": []}
    rates, linear_rates = [], []
    for _ in range(args.repeats):
        rates.append(matrix_product_rate(getattr(torch, dtype)))
        with OneDNNProducts():
            linear_rates.append(matrix_product_rate(getattr(torch, dtype), F.linear))
        for system, connection in connections.items():
            connection.send(args.updates)
            measurements[system]["runs"].append(connection.recv())
    for system, connection in connections.items():
        connection.send(0)
        measurements[system]["memory"], measurements[system]["compiled"] = connection.recv()
    rate = statistics.median(rates)
    figures = {system: summary(measurement, config, rate) for system, measurement in measurements.items()}
    if "ours" in figures:
        figures["ours"]["linear_gflops"] = round(statistics.median(linear_rates) / 1e9)
    return figures, skipped


def summary(measurement: dict, config: VaswaniConfig, rate: float) -> dict:
    """Figures of a system at one size and precision. `rate` is the machine's matrix product operations per second."""
    runs = measurement["runs"]
    speeds = sorted(counts.target / seconds for seconds, counts in runs)
    shares = [operations(config, c.source, c.target) / seconds / rate for seconds, c in runs]
    places = sum(counts.places for _, counts in runs)
    return {
        "target_tokens_per_second": round(statistics.median(speeds), 1),
        "range": [round(speeds[0], 1), round(speeds[-1], 1)],
        "mfu": round(statistics.median(shares), 3),
        "padding_share": round(1 - sum(c.source + c.target for _, c in runs) / places, 4),
        "peak_memory_mb": round(measurement["memory"] / 2**20),
        "matrix_products_gflops": round(rate / 1e9),
        **measurement["compiled"],
    }


def ratios(results: dict[str, dict]) -> dict:
    """Ratios of this package's throughput and peak memory to each peer's."""
    comparison = {}
    for peer in (system for system in results if "ours" in results and system != "ours"):
        ours, theirs = results["ours"], results[peer]
        comparison[f"speed_vs_{peer}"] = round(
            ours["target_tokens_per_second"] / theirs["target_tokens_per_second"], 2
        )
        comparison[f"memory_vs_{peer}"] = round(ours["peak_memory_mb"] / theirs["peak_memory_mb"], 2)
    return comparison


def step_times(model: PreTrainedModel, length: int, tokens: int, dtype: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of a forward pass and of a training step on `tokens` tokens in sentences of `length` tokens.

    This package's model runs as in its Trainer, without keeping the logits.
    """
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
    """Measure the times of both models against sentence length, at each size of `args.sizes`."""
    torch.set_num_threads(args.threads)
    milliseconds: dict = {}
    for size, dtype in product(args.sizes, args.dtypes):
        config = VaswaniConfig(**{"vocab_size": 10_000, **SIZES[size]})
        models = {"ours": VaswaniForConditionalGeneration(config), "marian": marian_like(config, LENGTHS[-1])}
        for length in LENGTHS:
            for system, model in models.items():
                times = step_times(model.to(device()).train(), length, args.tokens, dtype, args.repeats)
                milliseconds.setdefault(f"{size}-{dtype}", {}).setdefault(system, {})[length] = times
                print(f"{size} {dtype} {system:<7} n = {length:>4}: {times}", flush=True)
    return milliseconds


def length_ratios(milliseconds: dict) -> dict:
    """Ratios of the peer's times to this package's, at each length."""
    return {
        name: {
            length: {step: round(models["marian"][length][step] / time, 2) for step, time in times.items()}
            for length, times in models["ours"].items()
        }
        for name, models in milliseconds.items()
    }


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.training`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--train-files", nargs="+", help="sentence pairs: two text files, or one .tsv, .jsonl, .parquet"
    )
    parser.add_argument("--lengths", action="store_true", help="measure time against sentence length instead")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--tokens", type=int, default=4096, help="target tokens per update (%(default)s)")
    parser.add_argument("--part-tokens", type=int, default=2048, help="tokens per batch of this package (%(default)s)")
    parser.add_argument("--updates", type=int, default=3, help="updates per repetition (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="updates before the measurement (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile this package's model with torch.compile")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    args = parser.parse_args(argv)
    if args.warm_up < 1:
        parser.error(f"--warm-up must be at least 1, got {args.warm_up}")
    if args.lengths:
        milliseconds = measure_lengths(args)
        options = {"threads": args.threads, "tokens": args.tokens}
        print(json.dumps({**options, "milliseconds": milliseconds, "speed_vs_marian": length_ratios(milliseconds)}))
        return
    if not args.train_files:
        parser.error("--train-files or --lengths is required")
    torch.set_num_threads(args.threads)
    dataset, tokenizer = read_data(args.train_files)
    results = {}
    for size, dtype in product(args.sizes, args.dtypes):
        systems, skipped = train_all(args, size, dtype, dataset, tokenizer)
        for system, figures in systems.items():
            print(f"{size} {dtype} {system:<15} {figures}", flush=True)
        for system, reason in skipped.items():
            print(f"{size} {dtype} {system:<15} skipped: {reason}", flush=True)
        results[f"{size}-{dtype}"] = {"systems": systems, "skipped": skipped, **ratios(systems)}
    options = {"threads": args.threads, "tokens": args.tokens, "part_tokens": args.part_tokens}
    print(json.dumps({**options, "results": results}))


if __name__ == "__main__":
    main()
