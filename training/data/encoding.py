"""Sentence pairs, tokenised and filtered by length; every pair that is dropped is counted."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.distributed import split_dataset_by_node
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from .readers import DataError


logger = logging.getLogger(__name__)

ENCODER_VERSION = 1
BLOCK = 2**18  # pairs whose lengths are looked at at a time
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
    """`filter_by_length` for a stream: counts while it is read, and logs the report after each pass, or part of one,
    that was read.

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
        read = "Part of a pass"
        try:
            for pair in self.pairs:
                source, target = (np.array([pair[f"{side}_length"]]) for side in ("source", "target"))
                if self.report.count(source, target, self.max_length, self.max_ratio).all():
                    yield pair
            read = "A pass"
        finally:
            logger.info("%s over %s: %s.", read, self.name, self.report)

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
