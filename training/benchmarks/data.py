"""Time and memory of the data's way from text to batches, at the size of WMT14 English-German and beyond.

    python -m training.benchmarks.data --pairs 4500000
    python -m training.benchmarks.data --pairs 4500000 36000000 --plan-only

The pairs are synthetic. Source lengths in words are log-normal (median 19, sigma 0.65, at most 200), a target has the
length of its source times a log-normal factor (median 1, sigma 0.2); words are drawn by Zipf's law from 60,000 made-up
ones. With the vocabulary of 37,000 that is learned from the first pairs, a side has about 26 tokens on average, as in
section 5.1's data.

Each size is worked through twice, by processes of their own: the first start reads (and writes the cache), tokenises
(with `--num-proc` workers), filters, orders by length (bucketing) and plans an epoch; the second is the start of
`hf-vaswani train`, which finds all in the cache, and ends with its first batch. With `--plan-only`, lengths alone are
drawn, and bucketing and plan measured.

Memory is that of the process and its workers, at its peak in a stage: what is theirs alone and their parts of what
they share (Linux's Pss_Anon), looked at every 50 ms. Pages of the memory-mapped files, which the system may take back
at any time, are counted apart (Pss_File). Bytes a pair are the difference to the run of `--base` pairs. The times of a
second start leave the imports out. The last line is one JSON object.
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
SAMPLE = 100_000  # pairs that the vocabulary is learned from, and that are written at a time
TOKENS_PER_WORD = 1.15  # what the lengths of --plan-only are multiplied by, plus the end token


def draw_lengths(pairs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Words of sources and targets, int32 of shape `(pairs,)` each."""
    source = random.lognormal(np.log(MEDIAN), SIGMA, pairs)
    target = source * random.lognormal(0, FACTOR_SIGMA, pairs)
    return tuple(np.clip(side, 1, LONGEST).astype(np.int32) for side in (source, target))


def words(random: np.random.Generator) -> list[str]:
    """Made-up words of syllables, the frequent ones short; some appear twice."""
    syllables = ["".join(parts) for parts in zip("bdfghjklmnprstvwz" * 5, "aeiou" * 17, "nrslt" * 17)]
    sizes = 1 + (np.log(np.arange(VOCABULARY) + 2) / 4).astype(int)
    drawn, ends = random.integers(len(syllables), size=sizes.sum()), np.cumsum(sizes)
    return ["".join(syllables[i] for i in drawn[end - size : end]) for size, end in zip(sizes, ends)]


def write_pairs(folder: Path, pairs: int, seed: int) -> list[str]:
    """Two text files of synthetic pairs, unless they are there already."""
    files = [folder / f"{pairs}.{side}" for side in ("source", "target")]
    if all(file.exists() for file in files):
        return [str(file) for file in files]
    random = np.random.default_rng(seed)
    vocabulary = words(random)
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
    """Watches a process and all that come from it, from outside.

    Attributes:
        anonymous, mapped (`int`): The most bytes seen since `reset`: of their own, and of files' pages.
    """

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self.process, self.over = process, threading.Event()
        self.reset()

    def reset(self) -> None:
        self.anonymous = self.mapped = 0

    def run(self) -> None:
        while not self.over.wait(0.05):
            self.look()

    def look(self) -> None:
        found = {"Anon": 0, "File": 0}
        for process in descendants(self.process):
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                for kind in found:
                    found[kind] += 1024 * int(re.search(rf"^Pss_{kind}: +(\d+) kB", rollup, re.MULTILINE)[1])
        self.anonymous, self.mapped = max(self.anonymous, found["Anon"]), max(self.mapped, found["File"])


def descendants(process: int) -> Iterator[int]:
    """The process and all that come from it."""
    yield process
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def first_start(stage, args: argparse.Namespace, files: list[str], vocabulary: str) -> None:
    """From text to the plan of an epoch."""
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)
    pairs = stage("reading", load_pairs, files, "source", "target")
    pairs = stage("tokenising", tokenize, pairs, tokenizer, args.num_proc)
    pairs, report = stage("filtering", filter_by_length, pairs, args.max_length, args.max_ratio)
    both = stage("lengths", lengths, pairs)
    plan(stage, args, both)
    print(f"{report}; {both[0].mean():.1f} source and {both[1].mean():.1f} target tokens on average", flush=True)


def plan(stage, args: argparse.Namespace, both: tuple[np.ndarray, np.ndarray]) -> None:
    """Bucketing and one epoch's batches; the sampler stays while the epoch is planned."""
    sampler = stage("bucketing", TokenBudgetSampler, *both, args.tokens, args.tokens)
    planned = stage("epoch", lambda: sum(map(len, sampler)))
    if planned != len(both[0]):
        raise AssertionError(f"{planned} pairs are in the epoch's batches, of {len(both[0])}.")


def second_start(stage, args: argparse.Namespace, files: list[str], vocabulary: str) -> None:
    """What `hf-vaswani train` does until the first batch of a model of base size, with the checksums of its files."""
    words = ["--train_files", *files, "--source_lang", "source", "--target_lang", "target"]
    words += ["--tokenizer_from", vocabulary]
    words += ["--max_length", str(args.max_length), "--max_length_ratio", str(args.max_ratio)]
    words += ["--num_proc", str(args.num_proc)] if args.num_proc else []
    words += ["--source_tokens_per_update", str(args.tokens), "--target_tokens_per_update", str(args.tokens)]
    words += ["--tokens_per_device", str(args.tokens), "--report_to", "none"]

    def first_batch():
        with tempfile.TemporaryDirectory() as run:
            trainer = make_trainer(*parse_arguments([*words, "--output_dir", run]), checkpoint=None)
            log_size(trainer)
            return next(iter(trainer.get_train_dataloader()))

    stage("second start", first_batch)


def plan_only(stage, args: argparse.Namespace, pairs: int) -> None:
    """Bucketing and plan of lengths that are drawn, a block at a time."""

    def draw():
        random, both = np.random.default_rng(args.seed), np.empty((2, pairs), np.int32)
        for start in range(0, pairs, SAMPLE):
            block = draw_lengths(min(SAMPLE, pairs - start), random)
            both[:, start : start + SAMPLE] = np.minimum(np.multiply(block, TOKENS_PER_WORD) + 1, args.max_length)
        return both[0], both[1]

    plan(stage, args, stage("lengths", draw))


def work(connection, cache: str, job: Callable) -> None:
    """A process that does the job, and says where each of its stages ends, and what it took in seconds."""
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
    """Seconds and peak bytes of each stage of a job."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, cache, job))
    process.start()
    theirs.close()
    memory, found = Memory(process.pid), {}
    memory.start()
    try:
        while (name := ours.recv()) is not None:
            memory.reset()
            ours.send(None)
            seconds = ours.recv()
            memory.look()
            found[name] = {"seconds": round(seconds, 2), "bytes": memory.anonymous, "mapped": memory.mapped}
            print(f"{name:<12} {json.dumps(found[name])}", flush=True)
    finally:
        memory.over.set()
        process.join()
    return found


def measure_pairs(args: argparse.Namespace, folder: Path, pairs: int) -> dict[str, dict]:
    """All stages at one size."""
    print(f"{pairs:,} pairs", flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cache-") as cache:
        if args.plan_only:
            return measure(cache, partial(plan_only, args=args, pairs=pairs))
        files, vocabulary = write_pairs(folder, pairs, args.seed), folder / "vocabulary"
        if not vocabulary.exists():
            learn_vocabulary(files, vocabulary)
        inputs = {"args": args, "files": files, "vocabulary": str(vocabulary)}
        found = measure(cache, partial(first_start, **inputs))
        found["cache on disk"] = {"bytes": sum(path.stat().st_size for path in Path(cache).rglob("*"))}
        return found | measure(cache, partial(second_start, **inputs))


def learn_vocabulary(files: list[str], folder: Path) -> None:
    """A tokenizer of the first pairs, saved."""
    texts = []
    for file in files:
        with open(file, encoding="utf-8") as stream:
            texts += [line.strip() for _, line in zip(range(SAMPLE), stream)]
    train_tokenizer(texts, SUBWORDS, show_progress=False).save_pretrained(folder)


def bytes_a_pair(figures: dict[str, dict], base: dict[str, dict], pairs: int) -> dict[str, float]:
    """What a stage's peak has grown by against the base run, for each of the pairs that it has more."""
    return {
        name: round((figures[name]["bytes"] - base[name]["bytes"]) / pairs, 1)
        for name in figures
        if "seconds" in figures[name]
    }


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.data`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[4_500_000], help="sizes (%(default)s)")
    parser.add_argument("--base", type=int, default=100_000, help="pairs of the run to compare with (%(default)s)")
    parser.add_argument("--plan-only", action="store_true", help="draw lengths, no text")
    parser.add_argument("--num-proc", type=int, help="processes that tokenise")
    parser.add_argument("--tokens", type=int, default=3125, help="of a batch on one side (%(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--max-ratio", type=float, default=1.5, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, help="for the text files, which are kept; a temporary one otherwise")
    args = parser.parse_args(argv)
    if min(args.pairs) <= args.base or args.base < 1:
        parser.error(f"--pairs must be more than --base, {args.base}, and that positive")
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
