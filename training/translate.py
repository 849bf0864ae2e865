"""Translate raw text with a checkpoint: a file or standard input to a file or standard output, order kept.

Works with several processes, each on a device of its own: with --processes, or under torchrun or `accelerate launch`.
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
    """The command line of `hf-vaswani translate`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani translate", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, nargs="+", help="checkpoint folder or Hub repository; several are an ensemble")
    add("--input", default="-", help="text file, a sentence a line, plain or .gz (standard input)")
    add("--output", help="text file to write, compressed if it ends in .gz; a FIFO or a device such as /dev/null is "
        "written to directly (standard output)")  # fmt: skip
    add("--resume", action="store_true", help="go on with an --output that was interrupted")
    add("--format", choices=FORMATS, help="text: the best translation a line; nbest: Moses' lists; jsonl: an object a "
        "line, with scores and the log probability of every token (text, or nbest with --n-best)")  # fmt: skip
    add("--n-best", type=positive, help="translations of each sentence (1)")
    add("--target-prefix", help="text file parallel to --input: what each translation begins with, in whole words")
    add("--max-source-tokens", type=positive, help="longer lines are cut into pieces that are translated one by one "
        f"(the model's limit, or {MAX_SOURCE_TOKENS})")  # fmt: skip
    add("--long-lines", choices=("split", "error"), default="split", help="what to do about these (%(default)s)")
    add("--batch-tokens", type=positive, default=1024, help="source tokens of a batch (%(default)s)")
    add("--window", type=positive, default=10_000, help="lines sorted by length at a time (%(default)s)")
    add("--processes", type=positive, default=1, help="processes to start, on as many accelerators or all on the CPU")
    add("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    add("--num-beams", type=positive, help="instead of the checkpoint's")
    add("--length-penalty", type=finite, help="instead of the checkpoint's (the paper's α: 0.6)")
    add("--sample", action="store_true", help="draw translations at random, instead of searching for the likeliest")
    add("--temperature", type=above_zero, help="of --sample (1)")
    add("--top-k", type=positive, help="of --sample: from so many likeliest tokens (all)")
    add("--top-p", type=share, help="of --sample: from the likeliest tokens with this probability together (all)")
    add("--seed", type=int, help="of --sample: another draws other translations (0)")
    add_trust(parser)
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The arguments, where they make sense together; otherwise exits with a message, as argparse does."""
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
        parser.error("--processes needs an --input file, as every process reads it")
    given = [name for name in ("temperature", "top_k", "top_p", "seed") if getattr(args, name) is not None]
    if given and not args.sample:
        parser.error(f"--{given[0].replace('_', '-')} is for --sample")
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    if args.sample and (args.num_beams or 1) > 1:
        parser.error(f"--sample has no beams, got --num-beams {args.num_beams}")
    args.sampling = {name: getattr(args, name) for name in given} if args.sample else None
    if args.format == "text" and (args.n_best or 1) > 1:
        parser.error("--n-best needs --format nbest or jsonl: a text has one translation a line")
    args.format = args.format or ("text" if args.n_best is None else "nbest")
    args.n_best = args.n_best or 1
    options = {"num_beams": args.num_beams, "length_penalty": args.length_penalty}
    args.options = {name: value for name, value in options.items() if value is not None}
    return args


def describe(args: argparse.Namespace) -> dict:
    """What the translations depend on beside the lines, for `--resume` to compare; once the models are loaded."""
    names = ("dtype", "options", "format", "n_best", "sampling", "max_source_tokens", "long_lines")
    names += ("batch_tokens", "window")  # scores depend, in their last digits, on what is in a batch
    settings = {name: getattr(args, name) for name in names} | {"target_prefix": args.target_prefix is not None}
    return {"settings": settings, "files": model_files(args.model)}


def load_corpus(args: argparse.Namespace, device: torch.device) -> RequestBuilder:
    """The models, and how to translate lines with them, as the command line says.

    Raises:
        ValueError: The command line asks for what the models cannot do.
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
    """Lines to translate, unless they come from a stream.

    Raises:
        DataError: There are not as many prefixes, or a file cannot be read.
    """
    if not Path(args.input).is_file():
        return None
    return sum(1 for _ in read_sources(args.input, args.target_prefix))


def check_start(args: argparse.Namespace, processes: Processes) -> None:
    """Whether there is anything to start or to resume, before the models are loaded.

    Raises:
        FileExistsError, FileNotFoundError: As of `PartialOutput`.
        ValueError: There are not the processes that are asked for, or not all of them could read the input.
    """
    if processes.count > 1 and not Path(args.input).is_file():
        raise ValueError("Several processes need an --input file, as each of them reads it.")
    if args.processes > 1 and processes.count != args.processes:
        raise ValueError(f"--processes {args.processes}: something else has started {processes.count} already.")
    if processes.is_main and args.output is not None and not is_stream(args.output):
        PartialOutput.check(args.output, args.resume)


def open_output(args: argparse.Namespace, total: int | None) -> PartialOutput | DirectOutput:
    """Where the process that writes does so, for it to enter.

    Args:
        args (`argparse.Namespace`): Of `parse_arguments`.
        total (`int`, *optional*): Lines of the input, where it is a file.
    """
    if args.output is None or is_stream(args.output):
        return DirectOutput(args.output)
    sources = read_sources(args.input, args.target_prefix)
    each = args.n_best if args.format == "nbest" else 1
    most = None if total is None else total * each
    return PartialOutput(args.output, describe(args), sources, args.resume, most)


def translate_corpus(
    args: argparse.Namespace,
    corpus: RequestBuilder,
    output: PartialOutput | DirectOutput | None,
    done: int,
    total: int | None,
    processes: Processes,
) -> None:
    """Translate the lines from number `done` on, window by window, and say how fast it went.

    Args:
        args (`argparse.Namespace`): Of `parse_arguments`.
        corpus (`RequestBuilder`): How to translate.
        output (`PartialOutput` or `DirectOutput`, *optional*): Where to write to, in one process only.
        done (`int`), total (`int`, *optional*): Lines that are translated already, and in all.
        processes (`Processes`): Who takes part.
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
                for line, found in zip(lines, translations):
                    output.write(FORMATS[args.format](line.number - 1, line.text, found))
                output.end_window(lines)
    if processes.is_main:
        corpus.report()
        report_speed(done - first, tokens, time.perf_counter() - started)


def report_speed(sentences: int, tokens: int, seconds: float) -> None:
    """Log a line about it."""
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
            raise ValueError(f"--processes {args.processes}: there are only {devices} devices.")
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
