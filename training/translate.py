"""Translate raw text with a checkpoint, line by line and in order, from a file or standard input to a file or
standard output.

Several processes, each on its own device, share the work with --processes, torchrun or `accelerate launch`.
"""

import argparse
import contextlib
import logging
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch.distributed import is_torchelastic_launched
from tqdm import tqdm

from .data.readers import check_file
from .files import check_output, is_stream
from .inference.corpus import RequestBuilder, read_sources, translate_window
from .inference.formats import FORMATS
from .inference.loading import DTYPES, MAX_SOURCE_TOKENS, load_ensemble, source_limit
from .inference.resumable_output import DirectOutput, PartialOutput, model_files, partial_files
from .inference.search import Sampling, Search
from .inference.workers import Processes, launch
from .options import above_zero, add_trust, finite, positive, share


logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani translate`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani translate", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, nargs="+", help="checkpoint folder or Hub repository; several form an ensemble")
    add("--input", default="-", help="text file with one sentence per line, plain or .gz (default: standard input)")
    add("--output", help="text file to write, compressed if the name ends in .gz; a FIFO or a device, such as "
        "/dev/null, is written to directly (default: standard output)")  # fmt: skip
    add("--resume", action="store_true", help="resume an interrupted run that wrote to the same --output")
    add("--format", choices=FORMATS, help="output format: text has the best translation on each line, nbest is the "
        "n-best list of Moses, jsonl has one JSON object per line with scores and the log probability of every token "
        "(default: text, or nbest with --n-best)")  # fmt: skip
    add("--n-best", type=positive, help="number of translations per sentence (default: 1)")
    add("--target-prefix", help="text file parallel to --input with the words that each translation must begin with")
    add("--max-source-tokens", type=positive, help="maximum number of tokens in a line; --long-lines handles longer "
        f"lines (default: the model's limit, or {MAX_SOURCE_TOKENS})")  # fmt: skip
    add("--long-lines", choices=("split", "error"), default="split", help="split lines that exceed "
        "--max-source-tokens into pieces that are translated separately, or stop with an error "
        "(default: %(default)s)")  # fmt: skip
    add("--batch-tokens", type=positive, default=1024, help="source tokens per batch (default: %(default)s)")
    add("--window", type=positive, default=10_000, help="number of lines that are sorted by length and translated "
        "together (default: %(default)s)")  # fmt: skip
    add("--processes", type=positive, default=1, help="number of processes, each on its own accelerator, or all on "
        "the CPU if there is none (default: %(default)s)")  # fmt: skip
    add("--dtype", choices=DTYPES, default="auto", help="data type of the computation (default: that of the weights)")
    add("--num-beams", type=positive, help="beam size (default: the checkpoint's)")
    add("--length-penalty", type=finite, help="length penalty α, 0.6 in the paper (default: the checkpoint's)")
    add("--sample", action="store_true", help="sample translations at random instead of searching for the likeliest")
    add("--temperature", type=above_zero, help="temperature of --sample (default: 1)")
    add("--top-k", type=positive, help="restrict --sample to this number of most likely tokens (default: all tokens)")
    add("--top-p", type=share, help="restrict --sample to the most likely tokens whose probabilities add up to this "
        "number (default: all tokens)")  # fmt: skip
    add("--seed", type=int, help="random seed of --sample (default: 0)")
    add_trust(parser)
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments and check their combination. Exits with status 2 and a message if they conflict."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.input != "-":
        check_file(args.input, stream=True)
    if args.target_prefix not in (None, "-"):
        check_file(args.target_prefix)
    if args.output in ("-", "/dev/stdout"):
        args.output = None
    if args.output is not None:
        check_output(args.output, [args.input, args.target_prefix, *args.model], streams=True)
    if args.resume and (args.output is None or is_stream(args.output) or not Path(args.input).is_file()):
        parser.error("--resume needs an --input file and an --output file")
    if args.output is not None and not is_stream(args.output):
        for file in partial_files(args.output):
            check_output(file, [args.input, args.target_prefix, *args.model])
    if args.target_prefix == "-":
        parser.error("--target-prefix must be a file")
    if args.processes > 1 and not Path(args.input).is_file():
        parser.error("--processes needs an --input file, because every process reads it")
    sampling = [name for name in ("temperature", "top_k", "top_p", "seed") if getattr(args, name) is not None]
    if sampling and not args.sample:
        parser.error(f"--{sampling[0].replace('_', '-')} needs --sample")
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    if args.sample and (args.num_beams or 1) > 1:
        parser.error(f"--sample has no beams, got --num-beams {args.num_beams}")
    args.sampling = {name: getattr(args, name) for name in sampling} if args.sample else None
    if args.format == "text" and (args.n_best or 1) > 1:
        parser.error("--n-best needs --format nbest or jsonl: text has one translation per line")
    args.format = args.format or ("text" if args.n_best is None else "nbest")
    args.n_best = args.n_best or 1
    options = {"num_beams": args.num_beams, "length_penalty": args.length_penalty}
    args.options = {name: value for name, value in options.items() if value is not None}
    return args


def describe(args: argparse.Namespace) -> dict:
    """Settings and model files that the translations depend on, which `--resume` compares. Call it after the models
    are loaded."""
    names = ("dtype", "options", "format", "n_best", "sampling", "max_source_tokens", "long_lines")
    names += ("batch_tokens", "window")  # the last digits of scores depend on the composition of a batch
    settings = {name: getattr(args, name) for name in names} | {"target_prefix": args.target_prefix is not None}
    return {"settings": settings, "files": model_files(args.model)}


def load_corpus(args: argparse.Namespace, device: torch.device) -> RequestBuilder:
    """Load the models, and build the search and the requests that the arguments describe.

    Raises:
        ValueError: The models do not support the arguments.
    """
    models, tokenizer = load_ensemble(args.model, args.dtype, device, args.trust_remote_code)
    search = Search(
        models,
        tokenizer,
        args.batch_tokens,
        args.n_best,
        None if args.sampling is None else Sampling(**args.sampling),
        scores=args.format != "text",
        log_probabilities=args.format == "jsonl",
        **args.options,
    )
    limit = source_limit(models, args.max_source_tokens)
    return RequestBuilder(search, args.input, args.target_prefix, limit, args.long_lines == "split")


def count_lines(args: argparse.Namespace) -> int | None:
    """Number of lines to translate; `None` if the input is a stream.

    Raises:
        DataError: The number of prefixes differs, or a file cannot be read.
    """
    if not Path(args.input).is_file():
        return None
    return sum(1 for _ in read_sources(args.input, args.target_prefix))


def check_start(args: argparse.Namespace, processes: Processes) -> None:
    """Check the processes and the output before the models are loaded.

    Raises:
        FileExistsError, FileNotFoundError: See `PartialOutput`.
        ValueError: The number of processes differs from `--processes`, or they cannot all read the input.
    """
    if processes.count > 1 and not Path(args.input).is_file():
        raise ValueError("Several processes need an --input file, because each of them reads it.")
    if args.processes > 1 and processes.count != args.processes:
        raise ValueError(
            f"--processes {args.processes}: expected no launcher or as many processes, found {processes.count} that a "
            "launcher has started."
        )
    if processes.is_main and args.output is not None and not is_stream(args.output):
        PartialOutput.check(args.output, args.resume)


def open_output(args: argparse.Namespace, total: int | None) -> PartialOutput | DirectOutput:
    """Build the output of the main process, a context manager.

    Args:
        args (`argparse.Namespace`): Result of `parse_arguments`.
        total (`int`, *optional*): Number of input lines, if the input is a file.
    """
    if args.output is None or is_stream(args.output):
        return DirectOutput(args.output)
    sources = read_sources(args.input, args.target_prefix)
    lines_per_sentence = args.n_best if args.format == "nbest" else 1
    output_lines = None if total is None else total * lines_per_sentence
    return PartialOutput(args.output, describe(args), sources, args.resume, output_lines)


def translate_corpus(
    args: argparse.Namespace,
    corpus: RequestBuilder,
    output: PartialOutput | DirectOutput | None,
    done: int,
    total: int | None,
    processes: Processes,
) -> None:
    """Translate the lines after the first `done`, window by window, and log the speed.

    Args:
        args (`argparse.Namespace`): Result of `parse_arguments`.
        corpus (`RequestBuilder`): Search and builder of requests.
        output (`PartialOutput` or `DirectOutput`, *optional*): Output, in the main process only.
        done (`int`): Number of lines that are already translated.
        total (`int`, *optional*): Number of all lines, if it is known.
        processes (`Processes`): Processes that take part.
    """
    sources = islice(read_sources(args.input, args.target_prefix), done, None)
    bar = {"total": total, "initial": done, "unit": " sentences", "desc": "Translating"}
    first, tokens, started = done, 0, time.perf_counter()
    with tqdm(**bar, disable=not processes.is_main) as progress:
        while True:
            lines = processes.together(lambda: list(islice(sources, args.window)))
            if not lines:
                break
            requests = processes.together(lambda lines=lines: corpus.requests(lines))
            translations = translate_window(corpus.search, requests, processes, progress)
            tokens += sum(len(request.ids) for line in requests for request in line)
            done += len(lines)
            if output is not None:
                for line, candidates in zip(lines, translations):
                    output.write(FORMATS[args.format](line.number - 1, line.text, candidates))
                output.end_window(lines)
    if processes.is_main:
        corpus.report()
        report_speed(done - first, tokens, time.perf_counter() - started)


def report_speed(sentences: int, tokens: int, seconds: float) -> None:
    """Log sentences and source tokens per second."""
    logger.info(
        "%d sentences in %.1f s: %.1f sentences/s, %.0f source tokens/s.",
        *(sentences, seconds, sentences / seconds, tokens / seconds),
    )


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani translate`."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.processes > 1 and not is_torchelastic_launched():
        devices = torch.accelerator.device_count() if args.dtype != "int8" else 0
        if 0 < devices < args.processes:
            raise ValueError(f"--processes {args.processes}: expected as many accelerators, found {devices}.")
        launch(args.processes, f"{__package__}.cli", ["translate", *argv])
        return
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    processes = Processes(cpu=args.dtype == "int8")
    with contextlib.ExitStack() as stack:
        total = processes.together(lambda: count_lines(args))
        processes.together(lambda: check_start(args, processes))
        corpus = processes.together(lambda: load_corpus(args, processes.device))

        def enter_output() -> PartialOutput | DirectOutput | None:
            return stack.enter_context(open_output(args, total)) if processes.is_main else None

        output = processes.together(enter_output)
        done = processes.gather([0 if output is None else output.sentences])[0]
        translate_corpus(args, corpus, output, done, total, processes)
    processes.end()


if __name__ == "__main__":
    main()
