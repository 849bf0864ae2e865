"""Tokenisation of sentence pairs and filters by length. Every dropped pair is counted."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.distributed import split_dataset_by_node
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from .readers import DataError
from .two_sided_tokenizer import definition


logger = logging.getLogger(__name__)

ENCODER_VERSION = 1  # part of the cache key; increment it when the same text is encoded differently
BLOCK = 2**18  # pairs that are filtered at a time
TOKEN_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "source_length": Value("int32"),
        "target_length": Value("int32"),
    }
)


def tokenize(
    pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """Add the columns `input_ids` and `labels` (token ids, end token included), `source_length` and `target_length`.

    An empty or blank sentence has no tokens and the length 0.
    """

    def encode(batch):
        columns = {}
        for side, name, argument in (("source", "input_ids", "text"), ("target", "labels", "text_target")):
            ids = tokenizer(**{argument: batch[side]}, return_attention_mask=False)["input_ids"]
            columns[name] = [tokens if text.strip() else [] for tokens, text in zip(ids, batch[side])]
            columns[f"{side}_length"] = [len(tokens) for tokens in columns[name]]
        return columns

    if isinstance(pairs, IterableDataset):
        return pairs.map(encode, batched=True)
    # The cache key holds the vocabulary instead of the tokenizer object, whose hash depends on the folder that it was
    # loaded from. Otherwise a run that resumes from a checkpoint would tokenise all pairs again.
    vocabulary = definition(tokenizer), tokenizer.split_special_tokens
    key = Hasher.hash((pairs._fingerprint, ENCODER_VERSION, *vocabulary))
    features = Features({**pairs.features, **TOKEN_FEATURES})
    return pairs.map(
        encode, batched=True, num_proc=num_proc, features=features, new_fingerprint=key, desc="Tokenising"
    )


def lengths(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths of a tokenised data set, in tokens: two int32 arrays of shape `(pairs,)`."""
    return _column(dataset, "source_length"), _column(dataset, "target_length")


def _column(dataset: Dataset, name: str) -> np.ndarray:
    """A column of integers as an int32 array, read without creating Python integers."""
    values = _concatenate((chunk.to_numpy() for chunk in dataset.data.column(name).chunks), len(dataset.data))
    if dataset._indices is None:
        return values
    # A selected or filtered data set stores row numbers of its file.
    return _concatenate((values[rows.to_numpy()] for rows in dataset._indices.column(0).chunks), len(dataset))


def _concatenate(parts: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Concatenate integer arrays with `count` elements in total into an int32 array, in less memory than
    `np.concatenate`, which holds all parts and the result."""
    joined, start = np.empty(count, np.int32), 0
    for part in parts:
        joined[start : start + len(part)] = part
        start += len(part)
    return joined


@dataclass
class FilterReport:
    """Numbers of pairs that a filter read, kept, and dropped for each reason."""

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
        """Add pairs with these length arrays to the report, and return a mask of the pairs that are kept."""
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
    """Drop and count tokenised pairs that have an empty side, are too long, or differ too much in length.

    Args:
        dataset (`datasets.Dataset`): Output of `tokenize`.
        max_length (`float`): Maximum tokens of either side, end token included.
        max_ratio (`float`): Maximum ratio of the longer side to the shorter, in tokens.

    Raises:
        DataError: No pair is left.
    """
    report, is_kept = FilterReport(), np.empty(len(dataset), bool)
    source, target = lengths(dataset)
    for start in range(0, len(dataset), BLOCK):
        block = slice(start, start + BLOCK)
        is_kept[block] = report.count(source[block], target[block], max_length, max_ratio)
    if not report.kept:
        raise DataError(f"No pair is left: {report}.")
    if report.kept == report.pairs:
        return dataset, report
    del source, target
    # `filter` stores the kept rows in the cache on disk, keyed by their mask. `select` would hold them in memory.
    options = {"with_indices": True, "input_columns": [], "batched": True, "batch_size": 10_000}
    return dataset.filter(lambda rows: is_kept[rows], **options, desc="Filtering"), report


class FilteredStream:
    """`filter_by_length` for a stream. The report is logged after each pass, also after an incomplete one.

    Args:
        pairs (`datasets.IterableDataset`): Output of `tokenize`.
        max_length, max_ratio (`float`): See `filter_by_length`.
        name (`str`): Name of the pairs in the log.
    """

    def __init__(
        self,
        pairs: IterableDataset,
        max_length: float = np.inf,
        max_ratio: float = np.inf,
        name: str = "the training data",
    ):
        self.pairs, self.max_length, self.max_ratio, self.name = pairs, max_length, max_ratio, name
        self.report = FilterReport()  # of the current pass

    def __iter__(self) -> Iterator[dict]:
        extent = "Part of a pass"
        try:
            for pair in self.pairs:
                source, target = (np.array([pair[f"{side}_length"]]) for side in ("source", "target"))
                if self.report.count(source, target, self.max_length, self.max_ratio).all():
                    yield pair
            extent = "A pass"
        finally:
            logger.info("%s over %s: %s.", extent, self.name, self.report)

    def state_dict(self) -> dict:
        """Position after the last pair that was yielded, and the counts so far, as JSON-serialisable values."""
        return {"pairs": self.pairs.state_dict(), "report": asdict(self.report)}

    def load_state_dict(self, state: dict | None) -> None:
        """Start the next pass at a saved position, or at the beginning if `state` is `None`."""
        self.pairs.load_state_dict(None if state is None else state["pairs"])
        self.report = FilterReport(**({} if state is None else state["report"]))


def share_of_stream(
    pairs: IterableDataset | FilteredStream, rank: int, count: int
) -> IterableDataset | FilteredStream | None:
    """Split a stream by shards between devices, and return the share of device `rank` of `count`.

    All devices read the same number of shards, and no shard is read twice. Each file of a data set on the Hub is a
    shard. Local files are one shard together.

    Returns:
        A stream, or `None` where the number of shards is not divisible by `count`.
    """
    stream = pairs.pairs if isinstance(pairs, FilteredStream) else pairs
    if stream.num_shards % count:
        return None
    share = split_dataset_by_node(stream, rank, count)
    if not isinstance(pairs, FilteredStream):
        return share
    name = pairs.name if count == 1 else f"device {rank}'s share of {pairs.name}"
    return FilteredStream(share, pairs.max_length, pairs.max_ratio, name)
