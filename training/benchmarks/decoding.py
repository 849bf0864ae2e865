"""Benchmark beam search by this package, by MarianMT in transformers and by CTranslate2, with the same weights.

    python -m training.benchmarks.decoding --model base_size --sources test.en --references test.de

`enlarge.py` turns a small trained model into one of base size whose outputs have natural lengths.

All systems search with 4 beams. This package searches as in the paper (section 6.1), with one batch per thread; the
others use their own defaults. Each system uses its fastest batch size on sentences sorted by length. A separate
process selects the batch size; the measured process only loads the weights and searches. Repetitions are interleaved,
and medians are reported with the range. Only the search is timed, from token ids to token ids. The last line is one
JSON object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import sacrebleu
import torch
from transformers import AutoTokenizer

from ..data.readers import read_lines
from ..inference.batches import by_threads, token_batches
from ..inference.loading import load_checkpoint
from ..settings import KERNELS
from .memory import peak_memory


SYSTEMS = [
    "ours-float32",
    "ours-bfloat16",
    "ours-int8",
    "marian-float32",
    "marian-bfloat16",
    "ctranslate2-float32",
    "ctranslate2-bfloat16",
    "ctranslate2-int8",
]
BEAMS, EXTRA_TOKENS = 4, 50
MATRIX_PRODUCTS = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_int_mm"),
    "mkldnn::_linear_pointwise",
}

Search = Callable[[list[list[int]]], list[list[int]]]


def clean(sequence: list[int], special: set[int]) -> list[int]:
    return [token for token in sequence if token not in special]


def batched(search_batch: Callable, tokenizer, batches: Callable, in_threads: bool = False) -> Search:
    """Turn a search over a batch of token tensors into one over all sentences.

    With `in_threads`, batches run in parallel threads.
    """

    def search(sentences: list[list[int]]) -> list[list[int]]:
        def work(batch):
            return search_batch(tokenizer.pad({"input_ids": [sentences[i] for i in batch]}, return_tensors="pt"))

        outputs: list = [None] * len(sentences)
        index_batches = batches(sentences)
        results = by_threads(work, index_batches, torch.device("cpu")) if in_threads else map(work, index_batches)
        for batch, result in zip(index_batches, results):
            for index, output in zip(batch, result.tolist()):
                outputs[index] = clean(output, set(tokenizer.all_special_ids))
        return outputs

    return search


def load_ours(dtype: str, folder: str) -> dict[str, Search]:
    os.environ.update(KERNELS)  # as `hf-vaswani translate` does
    model, tokenizer = load_checkpoint(folder, dtype=dtype)
    options = {"num_beams": BEAMS, "length_penalty_form": "gnmt", "length_penalty": 0.6}

    def search_batch(inputs):
        return model.generate(**inputs, **options, max_extra_tokens=EXTRA_TOKENS)

    def batches(sentences, budget):
        return list(token_batches([len(sentence) for sentence in sentences], budget))

    def search(sentences, budget):
        with model.fixed_weights():
            return batched(search_batch, tokenizer, partial(batches, budget=budget), in_threads=True)(sentences)

    return {f"{budget} tokens": partial(search, budget=budget) for budget in (256, 512)}


def load_marian(dtype: str, folder: str) -> dict[str, Search]:
    model = torch.load(Path(folder, "marian.pt"), weights_only=False, mmap=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def search_batch(inputs):
        return model.generate(**inputs, num_beams=BEAMS, max_new_tokens=inputs["input_ids"].shape[1] + EXTRA_TOKENS)

    def batches(sentences, size):
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        return [order[start : start + size] for start in range(0, len(order), size)]

    return {
        f"{size} sentences": batched(search_batch, tokenizer, partial(batches, size=size)) for size in (8, 16, 32, 64)
    }


def load_ctranslate2(dtype: str, folder: str) -> dict[str, Search]:
    import ctranslate2

    tokenizer, threads = AutoTokenizer.from_pretrained(folder), torch.get_num_threads()

    @cache
    def translator(inter: int):
        return ctranslate2.Translator(folder, compute_type=dtype, inter_threads=inter, intra_threads=threads // inter)

    def search(sentences, inter, size):
        results = translator(inter).translate_batch(
            [tokenizer.convert_ids_to_tokens(sentence) for sentence in sentences],
            beam_size=BEAMS,
            max_batch_size=size,
            max_decoding_length=EXTRA_TOKENS + max(map(len, sentences)),
            max_input_length=0,
        )
        return [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]

    return {
        f"{size} sentences, {inter} x {threads // inter} threads": partial(search, inter=inter, size=size)
        for inter in {1, threads}
        for size in (16, 32, 64)
    }


LOADERS = {"ours": load_ours, "marian": load_marian, "ctranslate2": load_ctranslate2}


def convert(system: str, checkpoint: str, folder: str) -> None:
    """Convert the weights of a checkpoint to the format of a system."""
    name, dtype = system.split("-")
    model, tokenizer = load_checkpoint(checkpoint)
    if name == "ours":
        model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).save_pretrained(folder)
    elif name == "marian":
        from .peers import to_marian

        torch.save(to_marian(model).to(getattr(torch, dtype)), Path(folder, "marian.pt"))
    else:
        from ..conversion.ctranslate2 import write

        write(model, tokenizer, folder, dtype)
    tokenizer.save_pretrained(folder)


def matrix_product_share(search: Search, sentences: list[list[int]]) -> float:
    """Share of the time that PyTorch spends in matrix products, measured in one thread."""
    torch.set_num_threads(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        search(sentences)
    events = profile.key_averages()
    products = sum(event.self_cpu_time_total for event in events if event.key in MATRIX_PRODUCTS)
    return products / sum(event.self_cpu_time_total for event in events)


def choose(connection, system: str, checkpoint: str, folder: str, threads: int, sentences: list[list[int]]) -> None:
    """Convert the weights and select the fastest batch size, in a process of its own."""
    torch.set_num_threads(threads)
    name, dtype = system.split("-")
    times = {}
    try:
        convert(system, checkpoint, folder)
        for label, search in LOADERS[name](dtype, folder).items():
            search(sentences[:32])
            start = time.perf_counter()
            search(sentences)
            times[label] = time.perf_counter() - start
    except (ImportError, ValueError) as error:  # not installed, or the type is not supported on this processor
        connection.send({"skipped": str(error)})
        return
    connection.send({"batch": min(times, key=times.get)})


def work(connection, system: str, folder: str, threads: int, sentences: list[list[int]], batch: str) -> None:
    """Search on command in a process of its own, and finally send its peak memory."""
    torch.set_num_threads(threads)
    name, dtype = system.split("-")
    search = LOADERS[name](dtype, folder)[batch]
    search(sentences[:32])
    connection.send("ready")
    while (command := connection.recv()) != "end":
        start = time.perf_counter()
        outputs = search(sentences)
        connection.send((time.perf_counter() - start, outputs if command == "outputs" else None))
    memory = peak_memory(torch.device("cpu"))  # before the profiler, which needs memory too
    connection.send((memory, None if name == "ctranslate2" else matrix_product_share(search, sentences[::8])))


def start(target: Callable, *args) -> tuple:
    """Start a process, and return it with the connection to it."""
    context = multiprocessing.get_context("spawn")
    connection, worker_connection = context.Pipe()
    process = context.Process(target=target, args=(worker_connection, *args), daemon=True)
    process.start()
    return process, connection


def run(args: argparse.Namespace, folder: str) -> dict:
    """Measure all systems with interleaved repetitions. `folder` is for the converted weights."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sources = list(read_lines(args.sources))[: args.sentences]
    references = list(read_lines(args.references))[: args.sentences]
    sentences = [tokenizer(source)["input_ids"] for source in sources]
    sample = sentences[:: max(1, len(sentences) // 400)]  # enough to fill a batch of any size in every thread
    folders = {system: str(Path(folder, system)) for system in args.systems}
    workers: dict = {}
    results: dict = {}
    for system in args.systems:
        Path(folders[system]).mkdir()
        process, connection = start(choose, system, args.model, folders[system], args.threads, sample)
        answer = connection.recv()
        process.join()
        print(f"{system}: {answer}", flush=True)
        if "batch" in answer:
            results[system] = {"seconds": [], **answer}
    for system, result in results.items():
        workers[system] = start(work, system, folders[system], args.threads, sentences, result["batch"])
        workers[system][1].recv()
    for repetition in range(args.repeats):
        for system, (_, connection) in workers.items():
            connection.send("outputs" if repetition == 0 else "time")
            seconds, outputs = connection.recv()
            results[system]["seconds"].append(seconds)
            if outputs is not None:
                results[system]["tokens"] = sum(map(len, outputs)) + len(outputs)  # with the end tokens
                texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
                bleu = sacrebleu.corpus_bleu(texts, [references], tokenize=args.bleu_tokenize, force=True)
                results[system]["bleu"] = round(bleu.score, 2)
    for system, (process, connection) in workers.items():
        connection.send("end")
        memory, share = connection.recv()
        results[system] |= {"peak_memory_mb": round(memory / 2**20), "matrix_product_share": share}
        process.join()
        seconds = results[system]["seconds"]
        median = statistics.median(seconds)
        results[system]["sentences_per_second"] = round(len(sentences) / median, 1)
        results[system]["range"] = [round(len(sentences) / s, 1) for s in (max(seconds), min(seconds))]
        results[system]["tokens_per_second"] = round(results[system]["tokens"] / median)
    return results


def ratios(results: dict) -> dict:
    """Ratio of this package's sentences per second to each peer's, by type."""
    rates = {system: result["sentences_per_second"] for system, result in results.items()}
    speedups = {}
    for peer in ("marian", "ctranslate2"):
        pairs = {dtype: (f"ours-{dtype}", f"{peer}-{dtype}") for dtype in ("float32", "bfloat16", "int8")}
        speedups[f"ratio_vs_{peer}"] = {
            dtype: round(rates[ours] / rates[theirs], 2)
            for dtype, (ours, theirs) in pairs.items()
            if ours in rates and theirs in rates
        }
    for peer, name in (("marian-float32", "best_vs_marian_float32"), ("ctranslate2-", "best_vs_best_ctranslate2")):
        ours = [rate for system, rate in rates.items() if system.startswith("ours")]
        theirs = [rate for system, rate in rates.items() if system.startswith(peer)]
        if ours and theirs:
            speedups[name] = round(max(ours) / max(theirs), 2)
    return speedups


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.decoding`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder; d_k = d_v = d_model / num_heads")
    parser.add_argument("--sources", required=True, help="text file, one sentence per line, plain or .gz")
    parser.add_argument("--references", required=True, help="text file, parallel to --sources")
    parser.add_argument("--bleu-tokenize", default="none", help="sacrebleu's tokeniser (%(default)s)")
    parser.add_argument("--sentences", type=int, default=1000, help="number of sentences to translate (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    args = parser.parse_args(argv)
    for name in (args.sources, args.references):
        if not Path(name).is_file():
            parser.error(f"{name}: no such file")
    with tempfile.TemporaryDirectory() as folder:
        results = run(args, folder)
    for system, result in results.items():
        low, high = result["range"]
        share = result["matrix_product_share"]
        print(
            f"{system:<21} {result['sentences_per_second']:>7} sentences/s ({low}-{high})  "
            f"{result['tokens_per_second']:>6} tokens/s  {result['peak_memory_mb']:>5} MB  BLEU {result['bleu']}"
            + ("" if share is None else f"  {share:.0%} in matrix products")
        )
    print(json.dumps({"threads": args.threads, "results": results, **ratios(results)}))


if __name__ == "__main__":
    main()
