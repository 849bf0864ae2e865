"""Sentence pairs: read, checked, tokenised and filtered, through `datasets` (memory-mapped, cached).

Whatever the pairs come from, they end as a `datasets.Dataset` with the text columns `source` and `target`, to which
`tokenize` adds token ids and lengths. Nothing is lost in silence: what is broken is an error that names file and
line, what is filtered is counted.
"""

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

TEXT_FEATURES = Features({"source": Value("string"), "target": Value("string")})


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
        drop_empty (`bool`): Leave out pairs with an empty side and log their number, instead of raising.
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
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file.")
    # Size and time of change are part of the cache's key, so that a changed file is read again.
    stamps = tuple((str(Path(f).resolve()), Path(f).stat().st_size, Path(f).stat().st_mtime_ns) for f in files)
    kwargs = {"files": tuple(files), "langs": (source_lang, target_lang), "stamps": stamps}
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
    name: str, config: str | None, split: str, source_lang: str, target_lang: str, streaming: bool = False
) -> Dataset | IterableDataset:
    """Sentence pairs of a data set of the Hub in the `translation: {en, de}` layout of `wmt14`.

    Pairs with an empty side are dropped, and their number is logged (of a stream, it is not known beforehand).

    Raises:
        DataError: The data set has no such language.
    """
    dataset = load_dataset(name, config, split=split, streaming=streaming)
    features = dataset.features.get("translation")
    languages = getattr(features, "languages", None) or list(features or ())
    for lang in (source_lang, target_lang):
        if lang not in languages:
            raise DataError(
                f"{name} ({config}, {split}): no language {lang!r}; columns {list(dataset.features)}, "
                f"languages {list(languages)}."
            )
    pairs = dataset.map(
        lambda batch: {
            "source": [pair[source_lang] for pair in batch["translation"]],
            "target": [pair[target_lang] for pair in batch["translation"]],
        },
        batched=True,
        remove_columns=dataset.column_names,
        features=TEXT_FEATURES,
    )
    kept = pairs.filter(lambda pair: bool(pair["source"].strip() and pair["target"].strip()))
    if not streaming and len(kept) < len(pairs):
        logger.warning("%s: dropped %d pairs with an empty side.", name, len(pairs) - len(kept))
    return kept


def _checked_rows(files, langs, stamps, drop_empty) -> Iterator[dict[str, str]]:
    """Rows for `Dataset.from_generator`, without empty sides."""
    dropped = 0
    for place, source, target in _read(files, langs):
        empty = next((lang for lang, text in zip(langs, (source, target)) if not text.strip()), None)
        if empty is None:
            yield {"source": source, "target": target}
        elif drop_empty:
            dropped += 1
        else:
            raise DataError(f"{place}: empty {empty} sentence. Remove the pair, or set drop_empty to drop and count.")
    if dropped:
        logger.warning("%s: dropped %d pairs with an empty side.", ", ".join(files), dropped)


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

    Raises:
        DataError: A line is not UTF-8, or a gzip file is cut off or damaged.
    """
    with gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb") as stream:
        number = 1
        try:
            for line in stream:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                number += 1
        except UnicodeDecodeError as error:
            bad = error.object[error.start]
            raise DataError(f"{file}:{number}: byte 0x{bad:02x} at column {error.start + 1} is not UTF-8.") from error
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{file}:{number}: cannot be read: {error}") from error


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
        if not isinstance(columns[lang], str):
            raise DataError(f"{place}: column {lang!r} is not text: {columns[lang]!r:.40}.")
    return columns[langs[0]], columns[langs[1]]


def tokenize(
    pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """Add the columns `input_ids` and `labels` (token ids with the end token) and `source_length`, `target_length`."""

    def encode(batch):
        source = tokenizer(batch["source"], return_attention_mask=False)["input_ids"]
        target = tokenizer(batch["target"], return_attention_mask=False)["input_ids"]
        return {
            "input_ids": source,
            "labels": target,
            "source_length": [len(ids) for ids in source],
            "target_length": [len(ids) for ids in target],
        }

    if isinstance(pairs, IterableDataset):
        return pairs.map(encode, batched=True)
    return pairs.map(encode, batched=True, num_proc=num_proc, desc="Tokenising")


def lengths(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths in tokens, `(pairs,)` each, of a tokenised data set."""
    columns = dataset.select_columns(["source_length", "target_length"]).with_format("numpy")
    return columns["source_length"][:].astype(np.int32), columns["target_length"][:].astype(np.int32)


@dataclass
class FilterReport:
    """How many pairs a filter kept, and how many it dropped for what."""

    pairs: int
    kept: int
    too_long: int
    ratio: int

    def __str__(self) -> str:
        return (
            f"{self.kept} of {self.pairs} pairs kept; dropped: {self.too_long} too long, {self.ratio} by length ratio"
        )


def _too_long_and_bad_ratio(source, target, max_length: int, max_ratio: float | None) -> tuple:
    """Whether lengths `source` and `target`, numbers or arrays, are over the one limit, and else over the other."""
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    too_long = longer > max_length
    return too_long, ~too_long & (longer > (np.inf if max_ratio is None else max_ratio) * shorter)


def filter_by_length(
    dataset: Dataset, max_length: int, max_ratio: float | None = None
) -> tuple[Dataset, FilterReport]:
    """Drop tokenised pairs that are too long or whose sides differ too much in length, and count them.

    Args:
        dataset (`datasets.Dataset`): From `tokenize`.
        max_length (`int`): Tokens that either side may have, with the end token.
        max_ratio (`float`, *optional*): Largest allowed ratio of the longer side to the shorter, in tokens.

    Raises:
        DataError: No pair is left.
    """
    too_long, bad_ratio = _too_long_and_bad_ratio(*lengths(dataset), max_length, max_ratio)
    kept = np.flatnonzero(~too_long & ~bad_ratio)
    report = FilterReport(len(dataset), len(kept), int(too_long.sum()), int(bad_ratio.sum()))
    if not len(kept):
        raise DataError(f"No pair is left to train on: {report}.")
    return dataset.select(kept) if len(kept) < len(dataset) else dataset, report


class FilteredStream:
    """`filter_by_length` for a stream: counts while it is read, and logs the report after each pass.

    Args:
        pairs (`datasets.IterableDataset`): From `tokenize`.
        max_length, max_ratio: As for `filter_by_length`.
    """

    def __init__(self, pairs: IterableDataset, max_length: int, max_ratio: float | None = None):
        self.pairs, self.max_length, self.max_ratio = pairs, max_length, max_ratio

    def __iter__(self) -> Iterator[dict]:
        report = FilterReport(0, 0, 0, 0)
        for pair in self.pairs:
            too_long, bad_ratio = _too_long_and_bad_ratio(
                pair["source_length"], pair["target_length"], self.max_length, self.max_ratio
            )
            report.pairs += 1
            report.too_long += int(too_long)
            report.ratio += int(bad_ratio)
            if not too_long and not bad_ratio:
                report.kept += 1
                yield pair
        logger.info("A pass over the training data: %s.", report)
