"""Batches of pairs of similar length, filled to a token budget on each side (section 5.1).

An *update* is one optimiser step. It consists of `devices × accumulation` *parts*. A part is a batch of pairs of
similar length that fills a source budget and a target budget, and a device processes one part at a time. Parts and
their order depend only on the lengths, the seed and the epoch. Therefore 1 device × k accumulated parts and
k devices × 1 part learn from the same pairs in every update.
"""

import contextlib
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile

import datasets
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, Sampler


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of one device in an epoch, as the `batch_sampler` of a `DataLoader`.

    Pairs are sorted by target length, then by source length in alternately ascending and descending order. Neighbours
    are then similar on both sides, and parts have little padding. Each epoch shuffles the pairs of identical lengths
    among themselves, and the parts. Every pair is in exactly one part of one device. If the last update has too few
    parts, the remaining devices get an empty list, and `PairCollator` turns it into a batch without labels.

    Args:
        source_lengths, target_lengths (`np.ndarray` of shape `(pairs,)`): Lengths in tokens.
        source_budget, target_budget (`int`): Maximum tokens of a part on each side, padding included.
        num_replicas (`int`): Number of devices.
        rank (`int`): Rank of this device.
        accumulation (`int`): Parts per device and update.
        seed (`int`): Seed of the shuffling.
        shuffle (`bool`): Shuffle. Otherwise pairs of identical lengths stay in data order, and parts go from short to
            long.

    Raises:
        ValueError: A single pair exceeds a budget.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        source_budget: int,
        target_budget: int,
        num_replicas: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ):
        for side, lengths, budget in (
            ("source", source_lengths, source_budget),
            ("target", target_lengths, target_budget),
        ):
            if len(lengths) and lengths.max() > budget:
                raise ValueError(
                    f"Pair {int(lengths.argmax())} has {lengths.max()} {side} tokens, more than the {budget} tokens "
                    "of a batch: lower max_length, or raise the tokens per update or per device."
                )
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.source_budget, self.target_budget = source_budget, target_budget
        self.num_replicas, self.rank, self.accumulation = num_replicas, rank, accumulation
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0
        self._by_length, self._ties = self._length_order()
        self._bounds = self._part_bounds()

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch, counted from 0."""
        self.epoch = epoch

    @property
    def num_updates(self) -> int:
        """Optimiser steps in an epoch."""
        return -(-(len(self._bounds) - 1) // (self.num_replicas * self.accumulation))

    def __len__(self) -> int:
        return self.num_updates * self.accumulation

    def __iter__(self):
        parts = self.parts()
        for index in range(len(self) * self.num_replicas):
            part = next(parts, None)
            if index % self.num_replicas == self.rank:
                yield [] if part is None else part.tolist()

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the epoch's parts of all devices, in order, as index arrays of shape `(pairs of the part,)`."""
        random = np.random.default_rng((self.seed, self.epoch))
        by_length, order = self._by_length, np.arange(len(self._bounds) - 1)
        if self.shuffle:
            by_length = by_length.copy()
            for start, end in self._ties:
                random.shuffle(by_length[start:end])
            random.shuffle(order)
        for part in order:
            yield by_length[self._bounds[part] : self._bounds[part + 1]]

    def _length_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Sort all pairs by length, pairs of identical lengths in data order.

        Both lengths and the row are packed into one int64 key, which sorts many times faster than two keys. The keys
        take 8 bytes per pair while sorting; the result takes 4.

        Returns:
            Pair indices of shape `(pairs,)`, and the bounds of the groups of two or more pairs with identical lengths,
            of shape `(groups, 2)`.

        Raises:
            ValueError: The keys would exceed 63 bits.
        """
        count, columns = len(self.source_lengths), int(self.source_lengths.max(initial=0)) + 1
        if (int(self.target_lengths.max(initial=0)) + 1) * columns * count >= 2**63:
            raise ValueError(
                f"{count} pairs of up to {self.source_lengths.max()} source and {self.target_lengths.max()} target "
                "tokens cannot be sorted: their sort keys exceed 63 bits."
            )
        rows = np.int32 if count < 2**31 else np.int64
        keys = self.target_lengths.astype(np.int64)
        odd = self.target_lengths % 2 == 1
        keys *= columns
        keys += np.where(odd, self.source_lengths, columns - 1 - self.source_lengths)
        keys *= count
        keys += np.arange(count, dtype=rows)
        keys.sort()
        by_length = np.empty(count, rows)
        np.remainder(keys, count, out=by_length, casting="same_kind")
        keys //= max(count, 1)
        changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        bounds = np.concatenate([[0], changes, [count]])
        ties = np.stack([bounds[:-1], bounds[1:]], axis=1)
        return by_length, ties[np.diff(bounds) > 1]

    def _part_bounds(self) -> np.ndarray:
        """Bounds of the parts in length order, of shape `(parts + 1,)`. They hold for every epoch, because shuffling
        exchanges only pairs of identical lengths."""
        source, target = self.source_lengths[self._by_length], self.target_lengths[self._by_length]
        bounds = [0]
        while (start := bounds[-1]) < len(source):
            # Target lengths do not decrease, so this is the maximum number of pairs that can fit.
            window = slice(start, start + self.target_budget // int(target[start]))
            sizes = np.arange(1, len(source[window]) + 1)
            fits = (sizes * target[window] <= self.target_budget) & (
                sizes * np.maximum.accumulate(source[window]) <= self.source_budget
            )
            bounds.append(start + int(fits.sum()))
        return np.array(bounds)

    def padding_share(self) -> float:
        """Fraction of padding among the tokens of all parts, both sides together."""
        starts, sizes = self._bounds[:-1], np.diff(self._bounds)
        real = padded = 0
        for side in (self.source_lengths, self.target_lengths):
            real += int(side.sum())
            padded += int((np.maximum.reduceat(side[self._by_length], starts) * sizes).sum())
        return 1 - real / padded


class TokenBudgetStream(IterableDataset):
    """Batches of one device from a stream of pairs, which is read in endless passes.

    `TokenBudgetSampler` cuts one window of pairs at a time into batches. With `num_replicas` above 1, every device
    reads the same stream and takes its share of each window. Devices with streams of their own
    (`data.share_of_stream`) set `num_replicas` to 1. They stay in step although their streams differ in length,
    because no stream ends: a device with fewer pairs begins its next pass earlier.

    Args:
        pairs (`datasets.IterableDataset` or `data.FilteredStream`): Output of `data.tokenize`, without a shuffle
            buffer, whose content is not part of the state that `datasets` saves.
        collate (`PairCollator`): Function that makes a batch of pairs.
        window (`int`): Pairs per window. The next window is read in the background, so that two are in memory.
        **budget: See `TokenBudgetSampler`.

    Raises:
        ValueError: The stream is empty, or a single pair exceeds a budget.
    """

    START = {"updates": 0, "windows": 0, "pairs": None}

    def __init__(self, pairs: datasets.IterableDataset, collate: "PairCollator", window: int, **budget):
        self.pairs, self.collate, self.window, self.budget = pairs, collate, window, budget
        self._batches: Generator[dict] | None = None
        self.start_at(self.START)

    def position(self, updates: int) -> dict:
        """Start of the window that holds the batch after `updates` updates: an argument of `start_at`, serialisable
        as JSON."""
        windows_started = sum(position["updates"] <= updates for position in self._positions)
        self._positions = self._positions[windows_started - 1 :]
        return self._positions[0]

    def start_at(self, position: dict) -> None:
        """Start the next iteration at a window, without reading the pairs before it. Empty batches stand in for those
        before it, because the Trainer skips as many as it has learned from."""
        self._start, self._positions = position, [dict(position)]

    def __iter__(self) -> Iterator[dict]:
        self._batches = self._passes()
        return self._batches

    def close(self) -> None:
        """End the current pass, so that a `FilteredStream` reports the pairs it has dropped."""
        if self._batches is not None:
            self._batches.close()

    def _passes(self) -> Generator[dict]:
        start, self._start = self._start, self.START
        self._positions = [dict(start)]
        updates, windows, state = (start[name] for name in self.START)
        skipped = self.collate([])
        for _ in range(updates * self.budget.get("accumulation", 1)):
            yield skipped
        while True:
            is_empty = state is None
            for window, state_after in self._windows(state):
                lengths = (np.array([pair[f"{side}_length"] for pair in window]) for side in ("source", "target"))
                sampler = TokenBudgetSampler(*lengths, **self.budget)
                sampler.set_epoch(windows)
                for batch in sampler:
                    yield self.collate([window[index] for index in batch])
                updates, windows, is_empty = updates + sampler.num_updates, windows + 1, False
                self._positions.append({"updates": updates, "windows": windows, "pairs": state_after})
            if is_empty:
                raise ValueError("The training data is an empty stream.")
            self._positions[-1]["pairs"] = state = None  # the next pass

    def _windows(self, state: dict | None) -> Iterator[tuple[list[dict], dict | None]]:
        """Yield the remaining windows of a pass, each with the state of the stream after it. A thread reads the next
        window while the model learns from the current one."""
        self.pairs.load_state_dict(state)
        is_closed = threading.Event()

        def read() -> tuple[list[dict], dict | None]:
            window = list(islice(takewhile(lambda _: not is_closed.is_set(), stream), self.window))
            return window, self.pairs.state_dict() if window else None

        with contextlib.closing(iter(self.pairs)) as stream, ThreadPoolExecutor(1) as reader:
            try:
                pending = reader.submit(read)
                while (window_and_state := pending.result())[0]:
                    pending = reader.submit(read)
                    yield window_and_state
            finally:
                is_closed.set()


class PairCollator:
    """Collator that pads tokenised pairs to a batch.

    Args:
        pad_token_id (`int`): Padding of the sources. Labels are padded with -100, which the loss ignores.
        eos_token_id (`int`): Only token of an empty batch.
    """

    def __init__(self, pad_token_id: int, eos_token_id: int):
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id

    def __call__(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask` of shape `(batch, source)`, and `labels` of shape
        `(batch, target)`."""
        if not pairs:
            end = torch.tensor([[self.eos_token_id]])
            return {"input_ids": end, "attention_mask": torch.ones_like(end), "labels": torch.full_like(end, -100)}
        sources = [torch.as_tensor(pair["input_ids"], dtype=torch.long) for pair in pairs]
        targets = [torch.as_tensor(pair["labels"], dtype=torch.long) for pair in pairs]
        ones = [torch.ones_like(source) for source in sources]
        return {
            "input_ids": pad_sequence(sources, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence(ones, batch_first=True, padding_value=0),
            "labels": pad_sequence(targets, batch_first=True, padding_value=-100),
        }
