"""Translate raw text with a checkpoint: a file or standard input to a file or standard output, order kept.

Works with several processes, each on a device of its own: with --processes, or under torchrun or `accelerate launch`.
"""

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path

import torch
from torch.distributed import is_torchelastic_launched
from tqdm import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_vaswani import VaswaniTranslationPipeline

from .data import DataError, check_file, read_lines
from .output import FORMATS, PartialOutput, fingerprint
from .processes import Processes, launch
from .search import (
    Request,
    Sampling,
    Search,
    Translation,
    position_limit,
    share_of_batches,
    token_batches,
)
from .segment import split_line


logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
MAX_SOURCE_TOKENS = 1024  # of a model that has no limit itself


def encode(tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> list[list[int]]:
    """Token ids of sentences, end token included; none for what is empty or only white space."""
    texts = [sentence for sentence in sentences if sentence.strip()]
    ids = iter(tokenizer(texts)["input_ids"] if texts else [])
    return [next(ids) if sentence.strip() else [] for sentence in sentences]


@torch.no_grad()
def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch_tokens: int = 1024,
    progress: tqdm | None = None,
    **generate_kwargs,
) -> list[str]:
    """Translations of raw sentences, in their order.

    Args:
        model (`PreTrainedModel`): In evaluation mode. Its `generation_config` says how to search, and how long an
            output may be.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        sentences (`list[str]`): Raw text. An empty sentence gives an empty translation.
        batch_tokens (`int`): Source tokens of a batch, padding included.
        progress (`tqdm`, *optional*): Moved on by one a sentence.
        **generate_kwargs: For `generate()`.

    Returns:
        `list[str]`: As many as `sentences`.

    Raises:
        ValueError: A sentence is longer than the model's learned positions.
    """
    ids = encode(tokenizer, sentences)
    _check_lengths(model, sentences, ids)
    search = Search([model], tokenizer, batch_tokens, **generate_kwargs)
    translations = [""] * len(sentences)
    if progress is not None:
        progress.update(sum(not i for i in ids))
    batches = list(token_batches([len(i) for i in ids], batch_tokens))
    for batch, result in zip(batches, search.each([Request(i) for i in ids], batches)):
        for index, found in zip(batch, result):
            translations[index] = found[0].text
        if progress is not None:
            progress.update(len(batch))
    return translations


def _check_lengths(model: PreTrainedModel, sentences: list[str], ids: list[list[int]]) -> None:
    """Raises ValueError for a sentence that does not fit a learned position table."""
    room = position_limit(model)
    for sentence, tokens in zip(sentences, ids):
        if room is not None and len(tokens) > room:
            raise ValueError(
                f"A sentence has {len(tokens)} tokens, and the model's learned positions end at {room}: "
                f"{sentence[:60]!r}..."
            )


def translate_lines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: Iterable[str], window: int, **kwargs
) -> Iterator[str]:
    """Translations of a stream of lines, in order and in constant memory: `window` lines are sorted at a time."""
    lines = iter(lines)
    while chunk := list(islice(lines, window)):
        yield from translate(model, tokenizer, chunk, **kwargs)


def load_checkpoint(
    name: str, dtype: str = "auto", device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer of a folder or a Hub repository.

    Args:
        name (`str`): Folder or repository.
        dtype (`str`): Type to compute with: one of `DTYPES`; "auto" is the one the weights have, "int8" is for a CPU.
        device (`torch.device`, *optional*): Where to; the accelerator, if there is one.

    Raises:
        OSError: No such checkpoint.
        ValueError: The tokenizer does not have as many tokens as the model, give or take some padding of the latter.
    """
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="float32" if dtype == "int8" else dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(f"{name}: no such folder, and loading it from the Hub failed: {error}") from error
    if not 0 <= model.config.vocab_size - len(tokenizer) < VaswaniTranslationPipeline.MOST_PADDING:
        raise ValueError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}.")
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if dtype == "int8":
        model, device = model.to_int8(), "cpu"
    return model.eval().to(device), tokenizer


def load_ensemble(
    names: list[str], dtype: str = "auto", device: torch.device | None = None
) -> tuple[list[PreTrainedModel], PreTrainedTokenizerBase]:
    """Models that decode together, and their one tokenizer.

    Args:
        names, dtype, device: As of `load_checkpoint`, one name or more.

    Raises:
        ValueError: Two checkpoints have different tokenizers.
    """
    models, tokenizers = zip(*(load_checkpoint(name, dtype, device) for name in names))
    for name, tokenizer in zip(names, tokenizers):
        if tokenizer.backend_tokenizer.to_str() != tokenizers[0].backend_tokenizer.to_str():
            raise ValueError(f"{names[0]} and {name} have different tokenizers; an ensemble needs the same.")
    return list(models), tokenizers[0]


@dataclass
class Line:
    """A line to translate: its number from 1, its text, and what its translation begins with."""

    number: int
    text: str
    prefix: str = ""


def read_sources(file: str, prefix_file: str | None = None) -> Iterator[Line]:
    """The lines of a text file or of the standard input, `-`, with those of a parallel file of prefixes.

    Raises:
        DataError: The files do not have the same number of lines, or cannot be read.
    """
    if prefix_file is None:
        for number, text in enumerate(read_lines(file), start=1):
            yield Line(number, text)
        return
    for number, (text, prefix) in enumerate(zip_longest(read_lines(file), read_lines(prefix_file)), start=1):
        if text is None or prefix is None:
            shorter, longer = (file, prefix_file) if text is None else (prefix_file, file)
            raise DataError(f"{shorter} has {number - 1} lines, {longer} has more.")
        yield Line(number, text, prefix)


@dataclass
class Corpus:
    """Makes requests of lines: cuts what is too long, and looks for what cannot be translated.

    Args:
        search (`Search`): Whose model and tokenizer count.
        file (`str`), prefix_file (`str`, *optional*): What the lines are of, for messages.
        limit (`int`): Most source tokens of a line, with the end token.
        split (`bool`): Cut a longer line (see `segment.py`); otherwise it is an error.

    Attributes:
        cut (`list[int]`): Numbers of the lines that were cut.
    """

    search: Search
    file: str
    prefix_file: str | None
    limit: int
    split: bool
    cut: list[int] = field(default_factory=list)

    def requests(self, lines: list[Line]) -> list[list[Request]]:
        """Those of each line, in order: none for an empty one, several for one that is cut.

        A prefix is for the first piece. It ends where its last token does: its last word is taken as complete, and
        white space behind it as part of what follows.

        Raises:
            DataError: A line is too long and cannot or must not be cut, or a prefix fills the translation.
        """
        tokenizer, found = self.search.tokenizer, []
        for line, ids in zip(lines, encode(tokenizer, [line.text for line in lines])):
            pieces = [ids] if ids else []
            if len(ids) > self.limit:
                pieces = encode(tokenizer, self._cut(line, len(ids)))
            found.append([Request(piece, key=(line.number, index)) for index, piece in enumerate(pieces)])
            if line.prefix.strip() and pieces:
                found[-1][0].prefix = self._prefix(line, len(pieces[0]))
        return found

    def _cut(self, line: Line, tokens: int) -> list[str]:
        place = f"{_name(self.file)}:{line.number}"
        if not self.split:
            raise DataError(f"{place}: {tokens} tokens, where {self.limit} are allowed: {line.text[:60]!r}...")
        try:
            pieces = split_line(line.text, lambda text: len(self.search.tokenizer(text)["input_ids"]), self.limit)
        except ValueError as error:
            raise DataError(f"{place}: {error}") from None
        self.cut.append(line.number)
        return pieces

    def _prefix(self, line: Line, source_tokens: int) -> list[int]:
        prefix = self.search.tokenizer(line.prefix.rstrip(), add_special_tokens=False)["input_ids"]
        longest = self.search.longest_output(source_tokens)
        if longest is not None and len(prefix) >= longest:
            raise DataError(
                f"{self.prefix_file}:{line.number}: the prefix has {len(prefix)} tokens, and the translation of a "
                f"source of {source_tokens} ends at {longest}."
            )
        return prefix

    def notice(self) -> str:
        """What was cut; empty if nothing was."""
        if not self.cut:
            return ""
        some = ", ".join(map(str, self.cut[:5])) + (", ..." if len(self.cut) > 5 else "")
        count = f"{len(self.cut)} lines of {_name(self.file)} ({some})"
        return f"Cut into pieces, as they have more than {self.limit} tokens: {count}."

    def report(self) -> None:
        """Log what was cut, if anything was."""
        if self.cut:
            logger.warning(self.notice())


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def translate_window(
    search: Search, lines: list[list[Request]], processes: Processes, progress: tqdm
) -> list[list[Translation]]:
    """Translations of lines, given as the requests of each, by all processes together; in every process.

    Args:
        search (`Search`): With this process's models.
        lines (`list[list[Request]]`): The same in every process.
        processes (`Processes`): Who takes part.
        progress (`tqdm`): Moved on by one a line, by the end of the window.

    Returns:
        `list[list[Translation]]`: `search.n_best` a line, empty ones for an empty line.
    """
    requests = list(chain.from_iterable(lines))
    lengths, start = [len(request.ids) for request in requests], progress.n
    whole = len(lines) / max(1, len(requests))

    def work() -> list[tuple[int, list[Translation]]]:
        found = []
        batches = share_of_batches(search.batches(requests), lengths, processes.rank, processes.count)
        for batch, result in zip(batches, search.each(requests, batches)):
            found += zip(batch, result)
            progress.update(start + int(whole * len(found)) - progress.n)
        return found

    found = dict(processes.gather(processes.together(work)))
    progress.update(start + len(lines) - progress.n)
    pieces = iter([found[index] for index in range(len(requests))])
    translations = []
    for line in lines:
        ranks = zip(*islice(pieces, len(line))) if line else [[Translation()]] * search.n_best
        translations.append([Translation.joined(list(parts)) for parts in ranks])
    return translations


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0, for argparse."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def share(text: str) -> float:
    """A number above 0 and not above 1, for argparse."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return float(text)


def make_parser() -> argparse.ArgumentParser:
    """The command line of `hf-vaswani translate`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani translate", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, nargs="+", help="checkpoint folder or Hub repository; several are an ensemble")
    add("--input", default="-", help="text file, a sentence a line, plain or .gz (standard input)")
    add("--output", help="text file to write (standard output)")
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
    add("--length-penalty", type=float, help="instead of the checkpoint's (the paper's α: 0.6)")
    add("--sample", action="store_true", help="draw translations at random, instead of searching for the likeliest")
    add("--temperature", type=above_zero, help="of --sample (1)")
    add("--top-k", type=positive, help="of --sample: from so many likeliest tokens (all)")
    add("--top-p", type=share, help="of --sample: from the likeliest tokens with this probability together (all)")
    add("--seed", type=int, help="of --sample: another draws other translations (0)")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The arguments, where they make sense together; otherwise exits with a message, as argparse does."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for file in (args.input, args.target_prefix):
        if file is not None and file != "-":
            check_file(file)
    if args.output and not Path(args.output).parent.is_dir():
        parser.error(f"--output {args.output}: no such folder")
    if args.resume and not (args.output and Path(args.input).is_file()):
        parser.error("--resume needs an --input file and an --output file")
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
    """What the translations depend on, for `--resume` to compare."""
    job = {"model": args.model[0] if len(args.model) == 1 else args.model, "dtype": args.dtype}
    job |= {"options": args.options, "input": args.input, "content": None}
    job |= {"format": args.format, "n_best": args.n_best, "sampling": args.sampling}
    job |= {"max_source_tokens": args.max_source_tokens, "long_lines": args.long_lines}
    job |= {"target_prefix": args.target_prefix, "prefixes": None}
    if Path(args.input).is_file():
        job["content"] = fingerprint(args.input)
    if args.target_prefix:
        job["prefixes"] = fingerprint(args.target_prefix)
    return job


def source_limit(models: list[PreTrainedModel], wanted: int | None = None) -> int:
    """Most source tokens of a line, with the end token: what is wanted, or else what the models allow.

    Raises:
        ValueError: More is wanted than the models have learned positions for.
    """
    places = min((limit for limit in map(position_limit, models) if limit is not None), default=None)
    if places is not None and (wanted or 0) > places:
        raise ValueError(f"--max-source-tokens {wanted}: the model's learned positions end at {places}.")
    return wanted or places or MAX_SOURCE_TOKENS


def load_corpus(args: argparse.Namespace, device: torch.device) -> Corpus:
    """The models, and how to translate lines with them, as the command line says.

    Raises:
        ValueError: The command line asks for what the models cannot do.
    """
    models, tokenizer = load_ensemble(args.model, args.dtype, device)
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
    return Corpus(search, args.input, args.target_prefix, limit, args.long_lines == "split")


def count_lines(args: argparse.Namespace) -> int | None:
    """Lines to translate, unless they come from a stream.

    Raises:
        DataError: There are not as many prefixes, or a file cannot be read.
    """
    if not Path(args.input).is_file():
        return None
    return sum(1 for _ in read_sources(args.input, args.target_prefix))


def open_output(args: argparse.Namespace, processes: Processes) -> PartialOutput | None:
    """The file to write, of the process that writes; without `--output` that is its standard output."""
    if processes.count > 1 and not Path(args.input).is_file():
        raise ValueError("Several processes need an --input file, as each of them reads it.")
    if args.processes > 1 and processes.count != args.processes:
        raise ValueError(f"--processes {args.processes}: something else has started {processes.count} already.")
    if not processes.is_main:
        return None
    if args.output:
        return PartialOutput(args.output, describe(args), args.resume, args.n_best if args.format == "nbest" else 1)
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return None


def translate_corpus(args: argparse.Namespace, corpus: Corpus, output, done: int, total, processes: Processes) -> None:
    """Translate the lines from number `done` on, window by window, and say how fast it went.

    Args:
        args (`argparse.Namespace`): Of `parse_arguments`.
        corpus (`Corpus`): How to translate.
        output (file, *optional*): Where to write to, in one process only.
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
                output.flush()
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
        output = processes.together(lambda: open_output(args, processes))
        corpus = processes.together(lambda: load_corpus(args, processes.device))
        processes.together(lambda: output and stack.enter_context(output))
        done = processes.gather([0 if output is None else output.sentences])[0]
        if processes.is_main and output is None:
            output = sys.stdout
        translate_corpus(args, corpus, output, done, total, processes)
    processes.end()


if __name__ == "__main__":
    main()
