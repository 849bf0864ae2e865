"""Sentence pairs from files or from the Hub, as a `datasets.Dataset` with the text columns `source` and `target`."""

import logging
from collections.abc import Iterator
from pathlib import Path

import datasets
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError

from ..hub_connection import hub_failure
from .readers import DataError, check_file, read_pairs
from .swapped_sides import warnings
from .treebanks import TreeOptions, is_treebank, load_treebanks


logger = logging.getLogger(__name__)

# Part of the cache key. Increment it when the reader yields different pairs for the same file.
READER_VERSION = 1
TEXT_FEATURES = Features({"source": Value("string"), "target": Value("string")})


def load_pairs(
    files: list[str],
    source_lang: str,
    target_lang: str,
    drop_empty: bool = False,
    streaming: bool = False,
    trees: TreeOptions | None = None,
) -> Dataset | IterableDataset:
    """Load sentence pairs from files. Log a warning if the first line looks like a header, or the sides look swapped.

    Args:
        files (`list[str]`): Two parallel text files, source first, with one sentence per line; or one `.tsv` file
            (source, tab, target); or one `.jsonl` or `.parquet` file, either in the layout of WMT on the Hub,
            `{"translation": {"en": ..., "de": ...}}`, or with one column per language; or any number of `.trees` files,
            see `load_treebanks`. Text files may be gzipped.
        source_lang, target_lang (`str`): Language codes that name the columns.
        drop_empty (`bool`): Keep pairs with an empty side, which `filter_by_length` then drops and counts. Otherwise
            they are an error.
        streaming (`bool`): Read and check the pairs lazily.
        trees (`TreeOptions`, *optional*): Choices in linearising `.trees` files.

    Returns:
        `datasets.Dataset` (or `IterableDataset`) with the columns `source` and `target`, and `tree` for `.trees` files.

    Raises:
        DataError: Unequal numbers of lines, an empty line or file, bytes that are not UTF-8, invalid JSON, or a
            missing column. The message names the file and the line.
        OSError: A file does not exist, is not readable, or is not a regular file. Files are read more than once.
    """
    if files and is_treebank(files[0]):
        return load_treebanks(files, trees, streaming)
    if len(files) not in (1, 2):
        raise DataError(f"Expected two parallel text files or one file of pairs, got {len(files)}: {files}.")
    for file in files:
        check_file(file)
    langs = source_lang, target_lang
    for message in warnings(files, langs):
        logger.warning(message)
    # Size and modification time are part of the cache key, so that a changed file is read again.
    stamps = tuple((str(Path(f).resolve()), Path(f).stat().st_size, Path(f).stat().st_mtime_ns) for f in files)
    kwargs = {"files": tuple(files), "langs": langs, "stamps": (READER_VERSION, *stamps)}
    kwargs = {"gen_kwargs": {**kwargs, "drop_empty": drop_empty}, "features": TEXT_FEATURES}
    if streaming:
        return IterableDataset.from_generator(_checked_rows, **kwargs)
    try:
        pairs = Dataset.from_generator(_checked_rows, **kwargs)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (DataError, OSError)):  # OSError: no permission, or no disk space for the cache
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
    """Load sentence pairs from a data set on the Hub, in the `translation: {en, de}` layout of `wmt14` or with one
    column per language. Pairs with an empty side are kept, and `filter_by_length` drops and counts them.

    Args:
        name, config, split (`str`): See `datasets.load_dataset`.
        source_lang, target_lang (`str`): Language codes that name the columns.
        streaming (`bool`): Download the pairs lazily.
        num_proc (`int`, *optional*): Number of reading processes.

    Raises:
        ConnectionError: The Hub does not answer, and the cache has no copy of the data set.
        DataError: The data set lacks one of the languages.
    """
    if failure := None if Path(name).exists() else hub_failure():
        datasets.config.HF_HUB_OFFLINE = True  # a cached copy loads, or none, without waiting for the Hub
    try:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        if failure is None:
            raise
        raise ConnectionError(
            f"{name}: no such folder, and no copy of that data set in the cache ({failure}). Check the path or the "
            f"name, and the network: {' '.join(str(error).split())}"
        ) from error
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


def _checked_rows(files, langs, stamps, drop_empty) -> Iterator[dict[str, str]]:
    """Yield rows for `from_generator`. An empty side is an error unless `drop_empty` is set."""
    for place, source, target in read_pairs(files, langs):
        empty = next((lang for lang, text in zip(langs, (source, target)) if not text.strip()), None)
        if empty is not None and not drop_empty:
            raise DataError(f"{place}: empty {empty} sentence. Remove the pair, or set drop_empty to drop and count.")
        yield {"source": source, "target": target}
