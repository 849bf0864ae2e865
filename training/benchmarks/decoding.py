"""Benchmark translation by this package, by MarianMT in transformers and by CTranslate2, with the same weights.

    python -m training.benchmarks.decoding --model M --sources test.en --references test.de
    python -m training.benchmarks.decoding --model M --shape opus-mt --sources test.en --references test.de --quick

The model is a trained checkpoint, such as one that `hf-vaswani convert` has made. With `--shape` or `--vocab-size`, a
small trained model is enlarged first (`enlarge.py`), and its outputs keep their lengths. `--shape base` is the paper's
base model, and `--vocab-size 37000` its vocabulary (section 5.1).

Systems and their searches are described in `systems.py`. Only the search is timed, from token ids to texts. Every
measurement runs in a process of its own, which only loads the weights and searches. Each system first selects its
batch size on a few sentences; sizes are tried upwards until the rate falls. Repetitions are interleaved (A B C A B C).
Medians are reported, with the range. Then follow, also interleaved, single sentences (`latency.py`), and the limits of
the processor (`limits.py`).

A line that begins with a time is printed as soon as its figure is there. The last line is one JSON object:

- `results`: figures of each system. Tokens are those of the texts, as the tokenizer splits them, with end tokens.
- `skipped`: systems that were left out, with the reason.
- `ratio_vs_marian`, `ratio_vs_ctranslate2`: this package's sentences per second relative to the peer's, by type;
  `engine_vs_ctranslate2`: `--engine ctranslate2` relative to CTranslate2's own client.
- `latency_ms`: `p50` and `p95` of single sentences in milliseconds, and `share_of_memory_limit`;
  `latency_vs_marian`: MarianMT's `p50` relative to that of this package with packed weights.
- `share_of_matrix_product_limit`: by type; `limits.share_of_limit` describes the computation.
- `memory_gb_per_second`: bandwidth measured in the same run.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import sacrebleu
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hf_vaswani import VaswaniForConditionalGeneration

from ..conversion.positions import position_count
from ..data.readers import read_lines
from ..inference.loading import load_checkpoint
from ..options import positive
from .enlarge import SHAPES, grow, grow_tokenizer
from .latency import latency_ratios, latency_rows, translate_singly
from .latency import summary as latency_summary
from .limits import bandwidth, decoder_bytes, share_of_limit
from .memory import peak_memory
from .systems import CPU, EXTRA_TOKENS, SYSTEMS, convert, in_process, load, with_papers_search


RUN = 32  # sentences of similar length that stand together in a sample, as in a batch
PROFILED = 64  # sentences
QUICK = {"sentences": 100, "repeats": 1, "single_sentences": 8, "chosen_on": 64}
FULL = {"sentences": 1000, "repeats": 3, "single_sentences": 40, "chosen_on": 128}
DTYPES = ("float32", "bfloat16", "int8")


def sample(sentences: list[list[int]], count: int) -> list[list[int]]:
    """About `count` sentences: runs from the list sorted by length, evenly spaced, so that batches have as little
    padding as in the whole."""
    ordered = sorted(sentences, key=len)
    runs = [ordered[start : start + RUN] for start in range(0, len(ordered), RUN)]
    wanted = min(len(runs), max(1, count // RUN))
    return [sentence for i in range(wanted) for sentence in runs[(2 * i + 1) * len(runs) // (2 * wanted)]]


def choose(system: str, root: Path, threads: int, sentences: list[list[int]]) -> str:
    """Select the fastest batch size of a system. A group is left as soon as the rate falls."""
    torch.set_num_threads(threads)
    times: dict[str, float] = {}
    for group in load(system, root).batched:
        best = float("inf")
        for batch, search in group.items():
            search(sentences[:8])
            start = time.perf_counter()
            search(sentences)
            times[batch] = time.perf_counter() - start
            if times[batch] > best:
                break
            best = times[batch]
    return min(times, key=times.get)


def translate_all(
    system: str, root: Path, threads: int, sentences: list[list[int]], batch: str
) -> tuple[float, list[str], int]:
    """Seconds, texts, and peak memory in bytes of one repetition."""
    torch.set_num_threads(threads)
    search = load(system, root).search(batch)
    search(sentences[:RUN])
    start = time.perf_counter()
    texts = search(sentences)
    return time.perf_counter() - start, texts, peak_memory(CPU)


class Benchmark:
    """One run: the model, the sentences, and the figures so far.

    Args:
        args (`argparse.Namespace`): Options of the command.
        root (`Path`): Folder for converted weights.

    Raises:
        ValueError: A sentence is too long for the model, or the files have different lengths.
    """

    def __init__(self, args: argparse.Namespace, root: Path):
        self.args, self.root, self.start = args, root, time.perf_counter()
        self.model, self.tokenizer = prepare(args)
        self.sentences, self.references = read(args, self.model, self.tokenizer)
        self.results: dict[str, dict] = {}
        self.skipped: dict[str, str] = {}
        self.tell(f"{args.model}: {self.model.num_parameters():,} parameters, {len(self.sentences)} sentences")

    def tell(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:5.0f} s] {text}", flush=True)

    def tokens(self, texts: list[str]) -> int:
        return sum(map(len, self.tokenizer(texts)["input_ids"]))  # with the end tokens

    def throughput(self) -> None:
        """Measure sentences per second of all systems."""
        for turn in range(self.args.repeats):
            for system in self.args.systems:
                if turn == 0:
                    self.set_up(system)
                if system in self.results:
                    self.translate(system, turn)
        for result in self.results.values():
            result |= rates(result["seconds"], len(self.sentences), result["tokens"])

    def set_up(self, system: str) -> None:
        """Convert the weights and select the batch size, or skip a system that is not to be had here."""
        try:
            convert(system, self.model, self.tokenizer, self.root)
            few = sample(self.sentences, self.args.chosen_on)
            batch = in_process(choose, system, self.root, self.args.threads, few)
        except (ImportError, ValueError) as error:  # not installed; type or model not supported
            self.skipped[system] = str(error)
            self.tell(f"{system}: skipped: {error}")
            return
        self.results[system] = {"batch": batch, "seconds": []}
        self.tell(f"{system}: fastest with batches of {batch}")

    def translate(self, system: str, turn: int) -> None:
        """Measure one repetition of a system."""
        result = self.results[system]
        seconds, texts, memory = in_process(
            translate_all, system, self.root, self.args.threads, self.sentences, result["batch"]
        )
        result["seconds"].append(seconds)
        if turn == 0:
            bleu = sacrebleu.corpus_bleu(texts, [self.references], tokenize=self.args.bleu_tokenize, force=True)
            result |= {"tokens": self.tokens(texts), "bleu": round(bleu.score, 2)}
            result["peak_memory_mb"] = round(memory / 2**20)
        rate = len(self.sentences) / seconds
        self.tell(f"{system}: {rate:.1f} sentences/s (turn {turn + 1} of {self.args.repeats})")

    def latency(self, bytes_per_second: float) -> dict:
        """Measure the milliseconds of single sentences of all systems."""
        ordered, count = sorted(self.sentences, key=len), self.args.single_sentences
        sentences = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
        turns: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        for turn in range(self.args.repeats):
            for row in latency_rows(list(self.results)):
                found = in_process(translate_singly, row, self.root, self.args.threads, sentences)
                for search, (seconds, texts) in found.items():
                    turns[row][search].append((seconds, self.tokens(texts)))
                medians = ", ".join(f"{name} {1000 * statistics.median(s):.0f} ms" for name, (s, _) in found.items())
                self.tell(f"{row}: one sentence: {medians} (turn {turn + 1} of {self.args.repeats})")
        return {
            row: {
                search: latency_summary(each, self.step_bytes(row.split()[0]), bytes_per_second)
                for search, each in searches.items()
            }
            for row, searches in turns.items()
        }

    def step_bytes(self, system: str) -> int:
        return decoder_bytes(self.model.config, system.split("-")[1])

    def limits(self) -> dict[str, float]:
        """Measure the share of matrix products of all systems in PyTorch, and return that of the limit of ours."""
        shares = {}
        for system, result in self.results.items():
            name, dtype = system.split("-")
            result["matrix_product_share"] = None
            if name in ("ours", "marian"):
                few = sample(self.sentences, PROFILED)
                inputs = (system, self.root, result["batch"], few, self.step_bytes(system))
                result["matrix_product_share"], share = in_process(share_of_limit, *inputs)
                self.tell(f"{system}: {share:.0%} of the matrix product limit")
                if name == "ours":
                    shares[dtype] = round(share, 3)
        return shares


def prepare(args: argparse.Namespace) -> tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]:
    """Load the model in float32, enlarged if wanted, with the paper's search, and its tokenizer."""
    disable_progress_bar()
    model, tokenizer = load_checkpoint(args.model, "float32", CPU)
    if not isinstance(model, VaswaniForConditionalGeneration):
        raise ValueError(
            f"{args.model}: expected a Vaswani model, found {type(model).__name__}; see hf-vaswani convert."
        )
    if args.shape or args.vocab_size:
        model = grow(model, args.shape or "base", args.vocab_size)
        tokenizer = grow_tokenizer(tokenizer, model.config.vocab_size)
    return with_papers_search(model), tokenizer


def read(
    args: argparse.Namespace, model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], list[str]]:
    """Read and tokenise the first sentences, and read their references."""
    sources, references = (list(read_lines(name))[: args.sentences] for name in (args.sources, args.references))
    if len(sources) != len(references) or not sources:
        raise ValueError(
            f"{args.sources}, {args.references}: expected as many references as sentences, and some, "
            f"found {len(references)} and {len(sources)}."
        )
    sentences = tokenizer(sources)["input_ids"]
    places = position_count(model.config)
    for number, sentence in enumerate(sentences, 1):
        if len(sentence) + EXTRA_TOKENS >= places:
            raise ValueError(
                f"{args.sources}: line {number}: {len(sentence)} tokens and {EXTRA_TOKENS} more do not fit the "
                f"model's {places} positions."
            )
    return sentences, references


def rates(seconds: list[float], sentences: int, tokens: int) -> dict:
    """Median rates of all repetitions, and the range."""
    median = statistics.median(seconds)
    return {
        "sentences_per_second": round(sentences / median, 1),
        "range": [round(sentences / s, 1) for s in (max(seconds), min(seconds))],
        "tokens_per_second": round(tokens / median),
    }


def ratios(results: dict) -> dict:
    """Ratios of sentences per second to each peer's, by type."""
    rate = {system: result["sentences_per_second"] for system, result in results.items()}
    speedups: dict = {}
    for name, ours, theirs in (
        ("ratio_vs_marian", "ours", "marian"),
        ("ratio_vs_ctranslate2", "ours", "ctranslate2"),
        ("engine_vs_ctranslate2", "engine", "ctranslate2"),
    ):
        pairs = {dtype: (f"{ours}-{dtype}", f"{theirs}-{dtype}") for dtype in DTYPES}
        speedups[name] = {dtype: round(rate[a] / rate[b], 2) for dtype, (a, b) in pairs.items() if {a, b} <= set(rate)}
    for peer, name in (("marian-float32", "best_vs_marian_float32"), ("ctranslate2-", "best_vs_best_ctranslate2")):
        best = [max((r for s, r in rate.items() if s.startswith(start)), default=None) for start in ("ours", peer)]
        if None not in best:
            speedups[name] = round(best[0] / best[1], 2)
    return speedups


def tables(results: dict, latencies: dict) -> str:
    """Figures as text, a line a system."""
    lines = []
    for system, result in results.items():
        low, high = result["range"]
        share = result["matrix_product_share"]
        lines.append(
            f"{system:<21} {result['sentences_per_second']:>7} sentences/s ({low}-{high})  "
            f"{result['tokens_per_second']:>6} tokens/s  {result['peak_memory_mb']:>5} MB  BLEU {result['bleu']}"
            + ("" if share is None else f"  {share:.0%} in matrix products")
        )
    for row, searches in latencies.items():
        cells = [
            f"{search} {each['p50']} ms (p95 {each['p95']}, {each['share_of_memory_limit']:.0%} of the memory limit)"
            for search, each in searches.items()
        ]
        lines.append(f"{row:<28} one sentence: {'; '.join(cells)}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder; d_k and d_v at most d_model / num_heads")
    add("--shape", choices=SHAPES, help="enlarge the model to this shape: a row of Table 3, or opus-mt")
    add("--vocab-size", type=positive, help="enlarge the vocabulary to this size")
    add("--sources", required=True, help="text file, one sentence per line, plain or .gz")
    add("--references", required=True, help="text file, parallel to --sources")
    add("--bleu-tokenize", default="none", help="sacrebleu's tokeniser (%(default)s)")
    add("--quick", action="store_true", help="rough figures: fewer sentences, one repetition")
    add("--sentences", type=positive, help=f"sentences to translate ({FULL['sentences']}, quick {QUICK['sentences']})")
    add("--repeats", type=positive, help=f"repetitions ({FULL['repeats']}, quick {QUICK['repeats']})")
    add("--single-sentences", type=positive, help="sentences to translate one at a time "
        f"({FULL['single_sentences']}, quick {QUICK['single_sentences']})")  # fmt: skip
    add("--chosen-on", type=positive, help="sentences on which each system selects its batch size "
        f"({FULL['chosen_on']}, quick {QUICK['chosen_on']})")  # fmt: skip
    add("--threads", type=positive, default=2, help="CPU threads (%(default)s)")
    add("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.decoding`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for name in (args.sources, args.references):
        if not Path(name).is_file():
            parser.error(f"{name}: no such file")
    for name, value in (QUICK if args.quick else FULL).items():
        setattr(args, name, getattr(args, name) or value)
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(args, Path(folder))
        benchmark.throughput()
        bytes_per_second = in_process(bandwidth, args.threads)
        latencies = benchmark.latency(bytes_per_second)
        shares = benchmark.limits()
    print(tables(benchmark.results, latencies))
    figures = {
        "threads": args.threads,
        "results": benchmark.results,
        "skipped": benchmark.skipped,
        **ratios(benchmark.results),
        "latency_ms": latencies,
        "latency_vs_marian": latency_ratios(latencies),
        "share_of_matrix_product_limit": shares,
        "memory_gb_per_second": round(bytes_per_second / 1e9, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
