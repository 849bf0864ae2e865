"""Sentence pairs: read, checked, tokenised and filtered, through `datasets` (memory-mapped, cached).

Whatever the pairs come from, they end as a `datasets.Dataset` with the text columns `source` and `target`, to which
`tokenize` adds token ids and lengths, and `filter_by_length` takes out what cannot be used. Nothing is lost in
silence: what is broken is an error that names file and line, what is filtered is counted.
"""

import contextlib
import gzip
import json
import logging
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

# Parts of the caches' keys: to be raised when the same file would be read, or the same text encoded, differently.
READER_VERSION = 1
ENCODER_VERSION = 1
BLOCK = 2**18  # pairs whose lengths are looked at at a time
TEXT_FEATURES = Features({"source": Value("string"), "target": Value("string")})
TOKEN_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "source_length": Value("int32"),
        "target_length": Value("int32"),
    }
)


class DataError(ValueError):
    """Data that cannot be used as it is; the message names file and line."""


def load_pairs(
    files: list[str], source_lang: str, target_lang: str, drop_empty: bool = False, streaming: bool = False
) -> Dataset | IterableDataset:
    """Sentence pairs from files.

    Args:
        files (`list[str]`): Two parallel text files, source first (a sentence a line, `\\n` alone ends a line), or one
            `.tsv` (source, tab, target), `.jsonl` or `.parquet` file in the layout of WMT on the Hub,
            `{"translation": {"en": ..., "de": ...}}`, or with one column a language. Text files may be gzipped.
        source_lang, target_lang (`str`): Language codes, to find the columns.
        drop_empty (`bool`): Let pairs with an empty side through, for `filter_by_length` to drop and count.
        streaming (`bool`): Read and check the pairs only as they are asked for.

    Returns:
        `datasets.Dataset` (or `IterableDataset`) with the columns `source` and `target`.

    Raises:
        DataError: Unequal numbers of lines, an empty line or file, bytes that are not UTF-8, broken JSON, a missing
            column; the message names file and line.
        FileNotFoundError: No such file.
    """
    if len(files) not in (1, 2):
        raise DataError(f"Expected two parallel text files or one file of pairs, got {len(files)}: {files}.")
    for file in files:
        check_file(file)
    # Size and time of change are part of the cache's key, so that a changed file is read again.
    stamps = tuple((str(Path(f).resolve()), Path(f).stat().st_size, Path(f).stat().st_mtime_ns) for f in files)
    kwargs = {"files": tuple(files), "langs": (source_lang, target_lang), "stamps": (READER_VERSION, *stamps)}
    kwargs = {"gen_kwargs": {**kwargs, "drop_empty": drop_empty}, "features": TEXT_FEATURES}
    if streaming:
        return IterableDataset.from_generator(_checked_rows, **kwargs)
    try:
        pairs = Dataset.from_generator(_checked_rows, **kwargs)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise
    if not len(pairs):
        raise DataError(f"{', '.join(files)}: no sentence pairs.")
    return pairs


def load_hub_pairs(
    name: str,
    config: str | None,
    split: str,
    source_lang: str,
    target_lang: str,
    streaming: bool = False,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Sentence pairs of a data set of the Hub, in the `translation: {en, de}` layout of `wmt14` or with one column a
    language. Pairs with an empty side stay, for `filter_by_length` to drop and count.

    Args:
        name, config, split (`str`): As for `datasets.load_dataset`.
        source_lang, target_lang (`str`): Language codes, to find the columns.
        streaming (`bool`): Download the pairs only as they are asked for.
        num_proc (`int`, *optional*): Processes that read.

    Raises:
        DataError: The data set has no such language.
    """
    dataset = load_dataset(name, config, split=split, streaming=streaming)
    nested = dataset.features.get("translation")
    languages = list(dataset.features if nested is None else getattr(nested, "languages", nested))
    for lang in (source_lang, target_lang):
        if lang not in languages:
            raise DataError(f"{name} ({config}, {split}): no language {lang!r}; found {', '.join(languages)}.")

    def to_columns(batch):
        pairs = batch.get("translation") or [dict(zip(batch, row)) for row in zip(*batch.values())]
        return {
            "source": [pair[source_lang] or "" for pair in pairs],
            "target": [pair[target_lang] or "" for pair in pairs],
        }

    options = {} if streaming else {"num_proc": num_proc, "desc": "Reading"}
    return dataset.map(
        to_columns, batched=True, remove_columns=dataset.column_names, features=TEXT_FEATURES, **options
    )


def check_file(file: str) -> None:
    """Raises FileNotFoundError or IsADirectoryError unless `file` can be read."""
    if Path(file).is_dir():
        raise IsADirectoryError(f"{file}: is a folder, not a file.")
    if not Path(file).exists():
        raise FileNotFoundError(f"{file}: no such file.")


def _checked_rows(files, langs, stamps, drop_empty) -> Iterator[dict[str, str]]:
    """Rows for `from_generator`; an empty side is an error unless empty pairs are to be dropped later."""
    for place, source, target in _read(files, langs):
        empty = next((lang for lang, text in zip(langs, (source, target)) if not text.strip()), None)
        if empty is not None and not drop_empty:
            raise DataError(f"{place}: empty {empty} sentence. Remove the pair, or set drop_empty to drop and count.")
        yield {"source": source, "target": target}


def _read(files, langs) -> Iterator[tuple[str, str, str]]:
    """Triples of place ("file:line"), source and target."""
    if len(files) == 2:
        yield from _read_parallel(*files)
        return
    suffix = Path(files[0].removesuffix(".gz")).suffix
    readers = {".tsv": _read_tsv, ".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
    if suffix not in readers:
        raise DataError(
            f"{files[0]}: one file of pairs must end in {', '.join(readers)}, found {suffix or 'no ending'!r}."
        )
    yield from readers[suffix](files[0], langs)


def read_lines(file: str) -> Iterator[str]:
    """The lines of a text file, plain or gzipped, without their ends; only `\\n` (or `\\r\\n`) ends a line.

    Args:
        file (`str`): Path; `-` is the standard input.

    Raises:
        DataError: A line is not UTF-8, or a gzip file is cut off or damaged.
    """
    name, number = "standard input" if file == "-" else file, 1
    with _open(file) as stream:
        try:
            for line in stream:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                yield text.removeprefix("\ufeff") if number == 1 else text  # a byte order mark is no text
                number += 1
        except UnicodeDecodeError as error:
            bad = error.object[error.start]
            raise DataError(f"{name}:{number}: byte 0x{bad:02x} at column {error.start + 1} is not UTF-8.") from error
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{name}:{number}: cannot be read: {error}") from error


def _open(file: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if file == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    return gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb")


def _read_parallel(source_file: str, target_file: str) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, (source, target) in enumerate(zip_longest(read_lines(source_file), read_lines(target_file)), start=1):
        if source is None or target is None:
            short, long = (source_file, target_file) if source is None else (target_file, source_file)
            total = sum(1 for _ in read_lines(long))
            raise DataError(f"{short} has {number - 1} lines, {long} has {total}: line {number} has no counterpart.")
        empty_file = source_file if not source.strip() else target_file
        yield f"{empty_file}:{number}", source, target
    if number == 0:
        raise DataError(f"{source_file}: empty file.")


def _read_tsv(file: str, langs) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, line in enumerate(read_lines(file), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(
                f"{file}:{number}: expected 2 columns ({langs[0]}, tab, {langs[1]}), found {len(columns)}."
            )
        yield f"{file}:{number}", *columns
    if number == 0:
        raise DataError(f"{file}: empty file.")


def _read_jsonl(file: str, langs) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, line in enumerate(read_lines(file), start=1):
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: not a JSON object: {error}") from error
        yield place, *_sides(row, langs, place)
    if number == 0:
        raise DataError(f"{file}: empty file.")


def _read_parquet(file: str, langs) -> Iterator[tuple[str, str, str]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        parquet = ParquetFile(file)
    except ArrowInvalid as error:
        raise DataError(f"{file}: not a Parquet file: {error}") from error
    for batch in parquet.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{file}:{number}", *_sides(row, langs, f"{file}: row {number}")
    if number == 0:
        raise DataError(f"{file}: no rows.")


def _sides(row, langs, place: str) -> tuple[str, str]:
    """Source and target of a row `{"translation": {lang: text}}` or `{lang: text}`."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected an object with the languages {' and '.join(langs)}, found {row!r:.40}.")
    columns = row.get("translation", row)
    for lang in langs:
        if not isinstance(columns, dict) or lang not in columns:
            raise DataError(f"{place}: no column {lang!r}; found {', '.join(columns) if columns else 'none'}.")
        text = columns[lang]
        if not isinstance(text, str):
            raise DataError(f"{place}: column {lang!r} is not text: {text!r:.40}.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{place}: column {lang!r} holds half a surrogate pair, which no text does: {text!r:.40}.")
    return columns[langs[0]], columns[langs[1]]


def tokenize(
    pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """Add the columns `input_ids` and `labels` (token ids with the end token) and `source_length`, `target_length`.

    A sentence that is empty or only white space has no tokens at all, and the length 0.
    """

    def encode(batch):
        columns = {}
        for side, name in (("source", "input_ids"), ("target", "labels")):
            ids = tokenizer(batch[side], return_attention_mask=False)["input_ids"]
            columns[name] = [tokens if text.strip() else [] for tokens, text in zip(ids, batch[side])]
            columns[f"{side}_length"] = [len(tokens) for tokens in columns[name]]
        return columns

    if isinstance(pairs, IterableDataset):
        return pairs.map(encode, batched=True)
    # The vocabulary is the cache's key, not the tokenizer object, which also knows the folder that it was loaded from:
    # a run that goes on from a checkpoint would otherwise tokenise all pairs again.
    vocabulary = tokenizer.backend_tokenizer.to_str(), tokenizer.split_special_tokens
    key = Hasher.hash((pairs._fingerprint, ENCODER_VERSION, *vocabulary))
    features = Features({**pairs.features, **TOKEN_FEATURES})
    return pairs.map(
        encode, batched=True, num_proc=num_proc, features=features, new_fingerprint=key, desc="Tokenising"
    )


def lengths(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths in tokens, int32 of shape `(pairs,)` each, of a tokenised data set."""
    return _column(dataset, "source_length"), _column(dataset, "target_length")


def _column(dataset: Dataset, name: str) -> np.ndarray:
    """A column of integers as int32, without a Python integer for each."""
    values = _joined((chunk.to_numpy() for chunk in dataset.data.column(name).chunks), len(dataset.data))
    if dataset._indices is None:
        return values
    # What is selected or filtered is a list of rows of the file.
    return _joined((values[rows.to_numpy()] for rows in dataset._indices.column(0).chunks), len(dataset))


def _joined(parts: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Arrays of `count` integers in all, one after the other, in an int32 array; `np.concatenate` would hold both."""
    joined, start = np.empty(count, np.int32), 0
    for part in parts:
        joined[start : start + len(part)] = part
        start += len(part)
    return joined


@dataclass
class FilterReport:
    """How many pairs a filter kept, and how many it dropped for what."""

    pairs: int = 0
    kept: int = 0
    empty: int = 0
    too_long: int = 0
    ratio: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kept} of {self.pairs} pairs kept; dropped: {self.empty} empty, {self.too_long} too long, "
            f"{self.ratio} by length ratio"
        )

    def count(self, source, target, max_length: float = np.inf, max_ratio: float = np.inf) -> np.ndarray:
        """Add pairs of these lengths (arrays) to the report; whether each is kept."""
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        empty = shorter == 0
        too_long = ~empty & (longer > max_length)
        ratio = ~empty & ~too_long & (longer > max_ratio * np.maximum(shorter, 1))
        kept = ~empty & ~too_long & ~ratio
        self.pairs += len(kept)
        for name, mask in (("kept", kept), ("empty", empty), ("too_long", too_long), ("ratio", ratio)):
            setattr(self, name, getattr(self, name) + int(mask.sum()))
        return kept


def filter_by_length(
    dataset: Dataset, max_length: float = np.inf, max_ratio: float = np.inf
) -> tuple[Dataset, FilterReport]:
    """Drop tokenised pairs with an empty side, too long, or with sides too different in length, and count them.

    Args:
        dataset (`datasets.Dataset`): From `tokenize`.
        max_length (`float`): Tokens that either side may have, with the end token.
        max_ratio (`float`): Largest allowed ratio of the longer side to the shorter, in tokens.

    Raises:
        DataError: No pair is left.
    """
    report, kept = FilterReport(), np.empty(len(dataset), bool)
    source, target = lengths(dataset)
    for start in range(0, len(dataset), BLOCK):
        block = slice(start, start + BLOCK)
        kept[block] = report.count(source[block], target[block], max_length, max_ratio)
    if not report.kept:
        raise DataError(f"No pair is left: {report}.")
    if report.kept == report.pairs:
        return dataset, report
    del source, target
    # The rows that are kept go to the cache on disk, under a key that is made of them; `select` would hold them in
    # memory.
    options = {"with_indices": True, "input_columns": [], "batched": True, "batch_size": 10_000}
    return dataset.filter(lambda rows: kept[rows], **options, desc="Filtering"), report


class FilteredStream:
    """`filter_by_length` for a stream: counts while it is read, and logs the report after each pass.

    Args:
        pairs (`datasets.IterableDataset`): From `tokenize`.
        max_length, max_ratio (`float`): As for `filter_by_length`.
        name (`str`): What the log calls the pairs.
    """

    def __init__(
        self,
        pairs: IterableDataset,
        max_length: float = np.inf,
        max_ratio: float = np.inf,
        name: str = "the training data",
    ):
        self.pairs, self.max_length, self.max_ratio, self.name = pairs, max_length, max_ratio, name
        self.report = FilterReport()  # of the pass that is read

    def __iter__(self) -> Iterator[dict]:
        for pair in self.pairs:
            source, target = (np.array([pair[f"{side}_length"]]) for side in ("source", "target"))
            if self.report.count(source, target, self.max_length, self.max_ratio).all():
                yield pair
        logger.info("A pass over %s: %s.", self.name, self.report)

    def state_dict(self) -> dict:
        """Where the pass is, behind the pair that was given last, and what it has counted; for JSON."""
        return {"pairs": self.pairs.state_dict(), "report": asdict(self.report)}

    def load_state_dict(self, state: dict | None) -> None:
        """The next pass begins where another was; at the start, if `None`."""
        self.pairs.load_state_dict(None if state is None else state["pairs"])
        self.report = FilterReport(**({} if state is None else state["report"]))


def share_of_stream(
    pairs: IterableDataset | FilteredStream, rank: int, count: int
) -> IterableDataset | FilteredStream | None:
    """The shards of a stream that device `rank` of `count` reads, the same number for all, each by one device alone.

    Returns:
        A stream, or `None` where the number of shards cannot be divided by `count`. Files of one's own are one shard;
        of a data set of the Hub, each file is one.
    """
    stream = pairs.pairs if isinstance(pairs, FilteredStream) else pairs
    if stream.num_shards % count:
        return None
    share = split_dataset_by_node(stream, rank, count)
    if not isinstance(pairs, FilteredStream):
        return share
    name = pairs.name if count == 1 else f"device {rank}'s share of {pairs.name}"
    return FilteredStream(share, pairs.max_length, pairs.max_ratio, name)
