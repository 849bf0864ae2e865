"""Benchmark the time and memory of data preparation, from text to batches, at the size of WMT14 English-German.

    python -m training.benchmarks.data --pairs 4500000
    python -m training.benchmarks.data --pairs 4500000 36000000 --plan-only

The pairs are synthetic. Source lengths in words are log-normal (median 19, sigma 0.65, at most 200). The length of a
target is that of its source times a log-normal factor (median 1, sigma 0.2). Words are drawn from 60,000 made-up ones
by Zipf's law. A vocabulary of 37,000 is learned from the first pairs. Sentences then have about 26 tokens on average,
like the data of section 5.1.

Each size is measured twice, in separate processes. The first start reads the text and writes the cache, tokenises
(with `--num-proc` workers), filters, sorts by length (bucketing) and plans an epoch. The second start is that of
`hf-vaswani train` up to its first batch, with everything in the cache. With `--plan-only`, only lengths are drawn, and
only bucketing and planning are measured.

Memory is the peak of the process and its workers during a stage, sampled every 50 ms: anonymous memory, with shared
pages counted proportionally (Pss_Anon of Linux). Pages of memory-mapped files, which the system can reclaim at any
time, are reported separately (Pss_File). Bytes per pair are relative to the run with `--base` pairs. The time of the
second start excludes imports. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import datasets
import numpy as np
from transformers import AutoTokenizer

from ..data.batching import TokenBudgetSampler
from ..data.encoding import filter_by_length, lengths, tokenize
from ..data.pairs import load_pairs
from ..data.tokenizer import train_tokenizer
from ..trainer.arguments import parse_arguments
from ..trainer.run import log_size, make_trainer


MEDIAN, SIGMA, FACTOR_SIGMA, LONGEST = 19, 0.65, 0.2, 200  # words
VOCABULARY, SUBWORDS = 60_000, 37_000
SAMPLE = 100_000  # pairs from which the vocabulary is learned, and pairs per written block
TOKENS_PER_WORD = 1.15  # factor for the lengths of --plan-only, to which the end token is added


def draw_lengths(pairs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw the number of words of each source and target, int32 of shape `(pairs,)` each."""
    source = random.lognormal(np.log(MEDIAN), SIGMA, pairs)
    target = source * random.lognormal(0, FACTOR_SIGMA, pairs)
    return tuple(np.clip(side, 1, LONGEST).astype(np.int32) for side in (source, target))


def make_words(random: np.random.Generator) -> list[str]:
    """Make up words of random syllables. Frequent words are short, and some words occur twice."""
    syllables = ["".join(parts) for parts in zip("bdfghjklmnprstvwz" * 5, "aeiou" * 17, "nrslt" * 17)]
    sizes = 1 + (np.log(np.arange(VOCABULARY) + 2) / 4).astype(int)
    drawn, ends = random.integers(len(syllables), size=sizes.sum()), np.cumsum(sizes)
    return ["".join(syllables[i] for i in drawn[end - size : end]) for size, end in zip(sizes, ends)]


def write_pairs(folder: Path, pairs: int, seed: int) -> list[str]:
    """Write synthetic pairs to two text files, unless the files already exist."""
    files = [folder / f"{pairs}.{side}" for side in ("source", "target")]
    if all(file.exists() for file in files):
        return [str(file) for file in files]
    random = np.random.default_rng(seed)
    vocabulary = make_words(random)
    cumulative = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open(f"{file}.partial", "w", encoding="utf-8")) for file in files]
        for start in range(0, pairs, SAMPLE):
            for stream, sizes in zip(streams, draw_lengths(min(SAMPLE, pairs - start), random)):
                drawn = np.searchsorted(cumulative, random.random(sizes.sum()) * cumulative[-1]).tolist()
                ends = np.cumsum(sizes)
                for first, end in zip((ends - sizes).tolist(), ends.tolist()):
                    stream.write(" ".join([vocabulary[word] for word in drawn[first:end]]) + "\n")
    for file in files:
        Path(f"{file}.partial").rename(file)
    return [str(file) for file in files]


class Memory(threading.Thread):
    """Thread that samples the memory of a process and its descendants.

    Attributes:
        anonymous, mapped (`int`): Peak bytes of anonymous memory and of mapped files since `reset`.
    """

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self.process, self.stopped = process, threading.Event()
        self.reset()

    def reset(self) -> None:
        self.anonymous = self.mapped = 0

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            self.look()

    def look(self) -> None:
        usage = {"Anon": 0, "File": 0}
        for process in descendants(self.process):
            with contextlib.suppress(OSError):  # the process may have ended meanwhile
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                for kind in usage:
                    usage[kind] += 1024 * int(re.search(rf"^Pss_{kind}: +(\d+) kB", rollup, re.MULTILINE)[1])
        self.anonymous, self.mapped = max(self.anonymous, usage["Anon"]), max(self.mapped, usage["File"])


def descendants(process: int) -> Iterator[int]:
    """Ids of a process and all its descendants."""
    yield process
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def first_start(stage, args: argparse.Namespace, files: list[str], vocabulary: str) -> None:
    """Measure the stages from text to the plan of an epoch."""
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)
    pairs = stage("reading", load_pairs, files, "source", "target")
    pairs = stage("tokenising", tokenize, pairs, tokenizer, args.num_proc)
    pairs, report = stage("filtering", filter_by_length, pairs, args.max_length, args.max_ratio)
    tokens = stage("lengths", lengths, pairs)
    plan(stage, args, tokens)
    print(f"{report}; {tokens[0].mean():.1f} source and {tokens[1].mean():.1f} target tokens on average", flush=True)


def plan(stage, args: argparse.Namespace, tokens: tuple[np.ndarray, np.ndarray]) -> None:
    """Measure bucketing and the planning of one epoch, for the numbers of source and target tokens of each pair."""
    sampler = stage("bucketing", TokenBudgetSampler, *tokens, args.tokens, args.tokens)
    planned = stage("epoch", lambda: sum(map(len, sampler)))
    if planned != len(tokens[0]):
        raise AssertionError(f"The batches of the epoch have {planned} pairs, expected {len(tokens[0])}.")


def second_start(stage, args: argparse.Namespace, files: list[str], vocabulary: str) -> None:
    """Measure `hf-vaswani train` up to the first batch of the base model, checksums of the files included."""
    argv = ["--train_files", *files, "--source_lang", "source", "--target_lang", "target"]
    argv += ["--tokenizer_from", vocabulary]
    argv += ["--max_length", str(args.max_length), "--max_length_ratio", str(args.max_ratio)]
    argv += ["--num_proc", str(args.num_proc)] if args.num_proc else []
    argv += ["--source_tokens_per_update", str(args.tokens), "--target_tokens_per_update", str(args.tokens)]
    argv += ["--tokens_per_device", str(args.tokens), "--report_to", "none"]

    def first_batch():
        with tempfile.TemporaryDirectory() as run:
            trainer = make_trainer(*parse_arguments([*argv, "--output_dir", run]), checkpoint=None)
            log_size(trainer)
            return next(iter(trainer.get_train_dataloader()))

    stage("second start", first_batch)


def plan_only(stage, args: argparse.Namespace, pairs: int) -> None:
    """Measure bucketing and planning on lengths drawn block by block."""

    def draw():
        random, tokens = np.random.default_rng(args.seed), np.empty((2, pairs), np.int32)
        for start in range(0, pairs, SAMPLE):
            block = draw_lengths(min(SAMPLE, pairs - start), random)
            tokens[:, start : start + SAMPLE] = np.minimum(np.multiply(block, TOKENS_PER_WORD) + 1, args.max_length)
        return tokens[0], tokens[1]

    plan(stage, args, stage("lengths", draw))


def work(connection, cache: str, job: Callable) -> None:
    """Run a job in a process of its own, and send the name and the seconds of each of its stages."""
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    datasets.disable_progress_bars()

    def stage(name: str, function: Callable, *arguments):
        connection.send(name)
        connection.recv()
        start = time.perf_counter()
        result = function(*arguments)
        connection.send(time.perf_counter() - start)
        return result

    job(stage)
    connection.send(None)


def measure(cache: str, job: Callable) -> dict[str, dict]:
    """Measure the seconds and peak bytes of each stage of a job."""
    context = multiprocessing.get_context("spawn")
    connection, worker_connection = context.Pipe()
    process = context.Process(target=work, args=(worker_connection, cache, job))
    process.start()
    worker_connection.close()
    memory, figures = Memory(process.pid), {}
    memory.start()
    try:
        while (name := connection.recv()) is not None:
            memory.reset()
            connection.send(None)
            seconds = connection.recv()
            memory.look()
            figures[name] = {"seconds": round(seconds, 2), "bytes": memory.anonymous, "mapped": memory.mapped}
            print(f"{name:<12} {json.dumps(figures[name])}", flush=True)
    finally:
        memory.stopped.set()
        process.join()
    return figures


def measure_pairs(args: argparse.Namespace, folder: Path, pairs: int) -> dict[str, dict]:
    """Measure all stages at one size."""
    print(f"{pairs:,} pairs", flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cache-") as cache:
        if args.plan_only:
            return measure(cache, partial(plan_only, args=args, pairs=pairs))
        files, vocabulary = write_pairs(folder, pairs, args.seed), folder / "vocabulary"
        if not vocabulary.exists():
            learn_vocabulary(files, vocabulary)
        inputs = {"args": args, "files": files, "vocabulary": str(vocabulary)}
        figures = measure(cache, partial(first_start, **inputs))
        figures["cache on disk"] = {"bytes": sum(path.stat().st_size for path in Path(cache).rglob("*"))}
        return figures | measure(cache, partial(second_start, **inputs))


def learn_vocabulary(files: list[str], folder: Path) -> None:
    """Train a tokenizer on the first pairs and save it."""
    texts = []
    for file in files:
        with open(file, encoding="utf-8") as stream:
            texts += [line.strip() for _, line in zip(range(SAMPLE), stream)]
    train_tokenizer(texts, SUBWORDS, show_progress=False).save_pretrained(folder)


def bytes_a_pair(figures: dict[str, dict], base: dict[str, dict], pairs: int) -> dict[str, float]:
    """Growth of the peak memory of each stage relative to the base run, in bytes per additional pair."""
    return {
        name: round((figures[name]["bytes"] - base[name]["bytes"]) / pairs, 1)
        for name in figures
        if "seconds" in figures[name]
    }


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.data`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[4_500_000], help="sizes (%(default)s)")
    parser.add_argument("--base", type=int, default=100_000, help="pairs of the baseline run (%(default)s)")
    parser.add_argument("--plan-only", action="store_true", help="draw lengths instead of text")
    parser.add_argument("--num-proc", type=int, help="tokenisation workers")
    parser.add_argument("--tokens", type=int, default=3125, help="tokens per batch on each side (%(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="longest sentence in tokens (%(default)s)")
    parser.add_argument("--max-ratio", type=float, default=1.5, help="largest length ratio of a pair (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder to keep the text files in (default: a temporary folder)")
    args = parser.parse_args(argv)
    if min(args.pairs) <= args.base or args.base < 1:
        parser.error(f"--pairs must be more than --base, and --base at least 1, got {min(args.pairs)} and {args.base}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        base, results = measure_pairs(args, folder, args.base), {}
        for pairs in args.pairs:
            stages = measure_pairs(args, folder, pairs)
            results[pairs] = {"stages": stages, "bytes_a_pair": bytes_a_pair(stages, base, pairs - args.base)}
    print(json.dumps({"num_proc": args.num_proc, "tokens": args.tokens, "base": base, "results": results}))


if __name__ == "__main__":
    main()
