"""Translation of a file or stream, line by line and in order, with the options of `hf-vaswani translate`."""

import argparse
import contextlib
import logging
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_vaswani import VaswaniConfig
from hf_vaswani.checksums_vaswani import checksum

from ..data.readers import is_interactive
from ..data.tag_lexicon import TagLexicon
from ..files import is_stream
from .checkpoint_files import GENERATION
from .choices import ENGINES
from .corpus import RequestBuilder, read_sources, translate_window
from .formats import AsTrees, make_format
from .loading import load_ensemble, source_limit
from .resumable_output import DirectOutput, PartialOutput, model_files
from .search import Sampling, Search
from .tree_search import tree_constraint
from .workers import Processes


logger = logging.getLogger(__name__)


def describe(args: argparse.Namespace) -> dict:
    """Settings and model files that the translations depend on, which `--resume` compares. Call it after the models
    are loaded. `--skip-bad-lines` is not among them, so that a run can go on after a bad line."""
    names = ("dtype", "options", "format", "n_best", "sampling", "max_source_tokens", "long_lines")
    names += ("batch_tokens", "window")  # the last digits of scores depend on the composition of a batch
    settings = {name: getattr(args, name) for name in names} | {"target_prefix": args.target_prefix is not None}
    if args.engine != ENGINES[0]:  # records of earlier versions have no engine
        settings["engine"] = args.engine
    if args.format == "tree":
        settings["unconstrained"] = args.unconstrained
    if args.tag_lexicon:
        settings["tag_lexicon"] = [checksum(Path(file))["sha256"] for file in args.tag_lexicon]
    return {"settings": settings, "files": model_files(args.model)}


def load_search(args: argparse.Namespace, device: torch.device) -> tuple[Search, int]:
    """Load the models, and build the search that the arguments describe. Also return the maximum number of source
    tokens of a line.

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
        scores=args.format in ("nbest", "jsonl") or args.n_best > 1,
        log_probabilities=args.format == "jsonl",
        **args.options,
    )
    return search, source_limit(models, args.max_source_tokens)


def check_max_extra_tokens(model: PreTrainedModel) -> None:
    """Raise ValueError if `--max-extra-tokens` has no effect on a model."""
    if not isinstance(model.config, VaswaniConfig):
        raise ValueError(
            f"--max-extra-tokens: expected a model of this package, found {model.config.model_type!r} in "
            f"{model.name_or_path}."
        )
    for name in ("max_length", "max_new_tokens"):
        if (value := getattr(model.generation_config, name)) is not None:
            raise ValueError(
                f"--max-extra-tokens: {model.name_or_path}: {GENERATION}: {name}: expected none, found {value}, which "
                "takes precedence."
            )


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
        args (`argparse.Namespace`): Options of the command.
        total (`int`, *optional*): Number of input lines, if the input is a file.
    """
    if args.output is None or is_stream(args.output):
        return DirectOutput(args.output)
    sources = read_sources(args.input, args.target_prefix)
    lines_per_sentence = 1 if args.format == "jsonl" else args.n_best
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
    """Translate the lines after the first `done`, window by window, and log the speed. At a terminal, log how to end
    instead.

    Args:
        args (`argparse.Namespace`): Options of the command.
        corpus (`RequestBuilder`): Search and builder of requests.
        output (`PartialOutput` or `DirectOutput`, *optional*): Output, in the main process only.
        done (`int`): Number of lines that are already translated.
        total (`int`, *optional*): Number of all lines, if it is known.
        processes (`Processes`): Processes that take part.
    """
    sources = islice(read_sources(args.input, args.target_prefix), done, None)
    interactive, formatted = is_interactive(args.input), make_format(args.format, args.n_best)
    if interactive:
        logger.info("Reading standard input, one sentence per line. Ctrl-D ends.")
    bar = {"total": total, "initial": done, "unit": " sentences", "desc": "Translating"}
    first, tokens, started = done, 0, time.perf_counter()
    with tqdm(**bar, disable=not processes.is_main or interactive) as progress:
        while True:
            lines = processes.together(lambda: list(islice(sources, args.window)))
            if not lines:
                break
            requests = processes.together(lambda lines=lines: corpus.requests(lines))
            for reason in corpus.reasons.values() if interactive else ():
                logger.warning("Skipped: %s", reason)
            translations = translate_window(corpus.search, requests, processes, progress)
            tokens += sum(len(request.ids) for line in requests for request in line)
            done += len(lines)
            if output is not None:
                for line, candidates in zip(lines, translations):
                    reason = corpus.reasons.get(line.number)
                    output.write(formatted(line.number - 1, line.text, candidates, reason))
                output.end_window(lines)
    if processes.is_main and not interactive:
        corpus.report()
        if isinstance(formatted, AsTrees):
            logger.info(formatted.report())
        report_speed(done - first, tokens, time.perf_counter() - started)


def report_speed(sentences: int, tokens: int, seconds: float) -> None:
    """Log sentences and source tokens per second."""
    logger.info(
        "%d sentences in %.1f s: %.1f sentences/s, %.0f source tokens/s.",
        *(sentences, seconds, sentences / seconds, tokens / seconds),
    )


def translate_file(args: argparse.Namespace, load_search: Callable) -> None:
    """Translate the input of `hf-vaswani translate` in this process, one of a group or the only one.

    Args:
        args (`argparse.Namespace`): Options of the command.
        load_search (`Callable`): `load_search` of this module, or that of another engine.

    Raises:
        DataError, OSError, ValueError: The input, the models or the output cannot be used together.
    """
    logger.setLevel(logging.INFO)
    processes = Processes(cpu=args.dtype == "int8")

    def load_corpus() -> RequestBuilder:
        search, limit = load_search(args, processes.device)
        if "max_extra_tokens" in args.options:
            check_max_extra_tokens(search.model)
        if args.format == "tree":
            lexicon = TagLexicon(args.tag_lexicon) if args.tag_lexicon else None
            constraint = tree_constraint(search, lexicon)  # also for its checks
            search.constraint = None if args.unconstrained else constraint
        options = {"split": args.long_lines == "split", "skip": args.skip_bad_lines or is_interactive(args.input)}
        return RequestBuilder(search, args.input, args.target_prefix, limit, trees=args.format == "tree", **options)

    with contextlib.ExitStack() as stack:
        total = processes.together(lambda: count_lines(args))
        processes.together(lambda: check_start(args, processes))
        corpus = processes.together(load_corpus)

        def enter_output() -> PartialOutput | DirectOutput | None:
            return stack.enter_context(open_output(args, total)) if processes.is_main else None

        output = processes.together(enter_output)
        done = processes.gather([0 if output is None else output.sentences])[0]
        if is_interactive(args.input):
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))  # Ctrl-C ends a conversation as Ctrl-D does
        translate_corpus(args, corpus, output, done, total, processes)
    processes.end()
