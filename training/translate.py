"""Translate raw text with a checkpoint: a file or standard input to a file or standard output, order kept."""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_vaswani import VaswaniTranslationPipeline

from .data import check_file, read_lines


logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def token_batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices of `lengths` in batches of similar length, each of at most `budget` tokens with padding, longest first.

    A sentence over the budget is a batch of its own; a sentence of no tokens is in no batch.

    >>> list(token_batches([3, 1, 2, 0], budget=4))
    [[0], [2, 1]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not lengths[index]:
            break
        if batch and lengths[batch[0]] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.no_grad()
def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch_tokens: int = 4096,
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
    """
    ids = [tokenizer(s)["input_ids"] if s.strip() else [] for s in sentences]
    _check_lengths(model, sentences, ids)
    translations = [""] * len(sentences)
    if progress is not None:
        progress.update(sum(not i for i in ids))
    for batch in token_batches([len(i) for i in ids], batch_tokens):
        inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
        outputs = model.generate(**inputs, **generate_kwargs)
        for index, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True)):
            translations[index] = text
        if progress is not None:
            progress.update(len(batch))
    return translations


def _check_lengths(model: PreTrainedModel, sentences: list[str], ids: list[list[int]]) -> None:
    """Raises ValueError for a sentence that does not fit a learned position table; sinusoids have no limit."""
    if getattr(model.config, "position_embedding", None) != "learned":
        return
    room = model.config.max_position_embeddings
    for sentence, tokens in zip(sentences, ids):
        if len(tokens) > room:
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


def load_checkpoint(name: str, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in evaluation mode on the accelerator where there is one, and tokenizer of a folder or a Hub repository.

    Args:
        name (`str`): Folder or repository.
        dtype (`str`): Type to compute with: one of `DTYPES`; "auto" is the one the weights have, "int8" is for a CPU.

    Raises:
        OSError: No such checkpoint.
        ValueError: The tokenizer does not have as many tokens as the model, give or take some padding of the latter.
    """
    model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="float32" if dtype == "int8" else dtype)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if not 0 <= model.config.vocab_size - len(tokenizer) < VaswaniTranslationPipeline.MOST_PADDING:
        raise ValueError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}.")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if dtype == "int8":
        model, device = model.to_int8(), "cpu"
    return model.eval().to(device), tokenizer


class PartialOutput:
    """A file of translations that grows beside its final place, and can be gone on with after an interruption.

    Args:
        output (`str`): File to write. It appears when everything is translated; until then its lines are in
            `output.partial`, and what they were made from in `output.partial.json`.
        job (`dict`): What the translations depend on.
        resume (`bool`): Go on with a partial file.

    Attributes:
        lines (`int`): Translations that are there already.

    Raises:
        FileExistsError: There is a partial file, and it is not to be gone on with.
        FileNotFoundError: There is none to go on with.
        ValueError: It was made from something else.
    """

    def __init__(self, output: str, job: dict, resume: bool):
        self.output, self.partial, self.record = (
            Path(output),
            Path(f"{output}.partial"),
            Path(f"{output}.partial.json"),
        )
        self.lines = 0
        if resume:
            self._check(job)
            size = 0
            with open(self.partial, "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):  # the last one may be cut off
                        self.lines, size = self.lines + 1, size + len(line)
            os.truncate(self.partial, size)
        elif self.partial.exists():
            raise FileExistsError(
                f"{self.partial} holds an earlier run: pass --resume to go on with it, or delete it to start anew."
            )
        else:
            self.record.write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")

    def _check(self, job: dict) -> None:
        if not (self.partial.is_file() and self.record.is_file()):
            raise FileNotFoundError(f"--resume: there is no {self.partial} to go on with.")
        earlier = json.loads(self.record.read_text(encoding="utf-8"))
        if changed := [
            f"{name} ({earlier.get(name)!r}, now {job[name]!r})" for name in job if earlier.get(name) != job[name]
        ]:
            raise ValueError(f"--resume: {self.partial} is of another run: {', '.join(changed)}.")

    def __enter__(self) -> "PartialOutput":
        self.file = open(self.partial, "a", encoding="utf-8", newline="\n")
        return self

    def write(self, text: str) -> None:
        self.file.write(text)

    def __exit__(self, kind, *_) -> None:
        self.file.close()
        if kind is None:
            self.partial.replace(self.output)
            self.record.unlink()


def fingerprint(file: str) -> str:
    """Size and beginning of a file, which tell whether it is still the same."""
    with open(file, "rb") as stream:
        beginning = hashlib.sha256(stream.read(2**20)).hexdigest()
    return f"{Path(file).stat().st_size} bytes, {beginning[:16]}"


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani translate`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani translate", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--input", default="-", help="text file, a sentence a line, plain or .gz (standard input)")
    parser.add_argument("--output", help="text file to write (standard output)")
    parser.add_argument("--resume", action="store_true", help="go on with an --output that was interrupted")
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="source tokens of a batch (%(default)s)")
    parser.add_argument(
        "--window", type=positive, default=10_000, help="lines sorted by length at a time (%(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    parser.add_argument("--num-beams", type=positive, help="instead of the checkpoint's")
    parser.add_argument("--length-penalty", type=float, help="instead of the checkpoint's (the paper's α: 0.6)")
    args = parser.parse_args(argv)

    if args.input != "-":
        check_file(args.input)
    if args.output and not Path(args.output).parent.is_dir():
        parser.error(f"--output {args.output}: no such folder")
    if args.resume and not (args.output and Path(args.input).is_file()):
        parser.error("--resume needs an --input file and an --output file")
    options = {"num_beams": args.num_beams, "length_penalty": args.length_penalty}
    options = {name: value for name, value in options.items() if value is not None}
    output, total, done = sys.stdout, None, 0
    if Path(args.input).is_file():
        total = sum(1 for _ in read_lines(args.input))
    if args.output:
        job = {"model": args.model, "dtype": args.dtype, "options": options}
        job |= {"input": args.input, "content": fingerprint(args.input) if total is not None else None}
        output = PartialOutput(args.output, job, args.resume)
        done = output.lines
    else:
        output.reconfigure(encoding="utf-8", newline="\n")
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    with (
        output if args.output else contextlib.nullcontext(),
        tqdm(total=total, initial=done, unit=" sentences", desc="Translating") as progress,
    ):
        for text in translate_lines(
            model,
            tokenizer,
            islice(read_lines(args.input), done, None),
            args.window,
            batch_tokens=args.batch_tokens,
            progress=progress,
            **options,
        ):
            output.write(text.replace("\n", " ") + "\n")


if __name__ == "__main__":
    main()
