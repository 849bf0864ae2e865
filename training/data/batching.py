"""Batches as budgets of tokens on both sides (section 5.1), formed from pairs of similar length.

An *update*, what one optimiser step learns from, consists of *parts*: batches of pairs of similar length, as many as
fit a source and a target budget. A device takes one part at a time; `devices × accumulation` of them are an update.
Parts and their order depend on the lengths, the seed and the epoch alone, so that 1 device × k accumulated parts and
k devices × 1 part learn from the same pairs, update by update.
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
    """The batches that one device sees in an epoch, for a `DataLoader`'s `batch_sampler`.

    Pairs are sorted by target length and within it by source length, up and down in turn, so that neighbours are
    alike on both sides and a part is nearly free of padding. Pairs of the same lengths change places each epoch, and
    the parts are shuffled. Every pair is in exactly one part of one device. Where the last update has too few parts,
    a device gets an empty list, from which `PairCollator` makes a batch that counts nothing.

    Args:
        source_lengths, target_lengths (`np.ndarray` of shape `(pairs,)`): Lengths in tokens.
        source_budget, target_budget (`int`): Tokens of a part on either side, padding included.
        num_replicas (`int`): Devices.
        rank (`int`): Which of them this is.
        accumulation (`int`): Parts that each device adds to an update.
        seed (`int`): Of the order.
        shuffle (`bool`): `False`: same-length pairs in data order, parts from short to long.

    Raises:
        ValueError: A pair alone is over a budget.
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
                    f"Pair {int(lengths.argmax())} has {lengths.max()} {side} tokens, and a batch only {budget}: "
                    "lower max_length, or raise the tokens per update or per device."
                )
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.source_budget, self.target_budget = source_budget, target_budget
        self.num_replicas, self.rank, self.accumulation = num_replicas, rank, accumulation
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0
        self._by_length, self._ties = self._length_order()
        self._bounds = self._part_bounds()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, counted from 0."""
        self.epoch = epoch

    @property
    def num_updates(self) -> int:
        """Optimiser steps in an epoch."""
        return -(-(len(self._bounds) - 1) // (self.num_replicas * self.accumulation))

    def __len__(self) -> int:
        return self.num_updates * self.accumulation

    def __iter__(self):
        parts = self.parts()
        for place in range(len(self) * self.num_replicas):
            part = next(parts, None)
            if place % self.num_replicas == self.rank:
                yield [] if part is None else part.tolist()

    def parts(self) -> Iterator[np.ndarray]:
        """The epoch's parts, in order, for all devices: index arrays of shape `(pairs of the part,)`."""
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
        """All pairs in length order, those of the same lengths in data order, and where these begin and end.

        Lengths and row are sorted as one number: 8 bytes a pair for a moment, 4 for good, and many times as fast as
        sorting by two keys.
        """
        count, columns = len(self.source_lengths), int(self.source_lengths.max(initial=0)) + 1
        if (int(self.target_lengths.max(initial=0)) + 1) * columns * count >= 2**63:
            raise ValueError(f"{count} pairs of so many tokens cannot be ordered.")
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
        """Where the parts begin and end in length order; the same every epoch, since only ties change places."""
        source, target = self.source_lengths[self._by_length], self.target_lengths[self._by_length]
        bounds = [0]
        while (start := bounds[-1]) < len(source):
            # Target lengths only grow, so no more pairs than this can fit.
            window = slice(start, start + self.target_budget // int(target[start]))
            sizes = np.arange(1, len(source[window]) + 1)
            fits = (sizes * target[window] <= self.target_budget) & (
                sizes * np.maximum.accumulate(source[window]) <= self.source_budget
            )
            bounds.append(start + int(fits.sum()))
        return np.array(bounds)

    def padding_share(self) -> float:
        """Share of padding in the tokens of all parts, both sides together."""
        starts, sizes = self._bounds[:-1], np.diff(self._bounds)
        real = padded = 0
        for side in (self.source_lengths, self.target_lengths):
            real += int(side.sum())
            padded += int((np.maximum.reduceat(side[self._by_length], starts) * sizes).sum())
        return 1 - real / padded


class TokenBudgetStream(IterableDataset):
    """The batches that one device sees of pairs that are read as a stream, pass after pass without an end.

    A window of pairs at a time is cut into batches as `TokenBudgetSampler` does. With `num_replicas` above 1, every
    device reads the same stream and takes its share of each window. Devices that read streams of their own
    (`data.share_of_stream`) each have 1 replica. As no stream ends, they make as many updates as they are asked for,
    in step; the one with fewer pairs comes to its next pass the sooner.

    Args:
        pairs (`datasets.IterableDataset` or `data.FilteredStream`): From `data.tokenize`; not shuffled by a buffer,
            whose pairs `datasets` would not remember.
        collate (`PairCollator`): Makes a batch of the pairs chosen.
        window (`int`): Pairs to cut into batches at a time; as many are read meanwhile.
        **budget: As for `TokenBudgetSampler`.

    Raises:
        ValueError: The stream is empty, or a pair alone is over a budget.
    """

    START = {"updates": 0, "windows": 0, "pairs": None}

    def __init__(self, pairs: datasets.IterableDataset, collate: "PairCollator", window: int, **budget):
        self.pairs, self.collate, self.window, self.budget = pairs, collate, window, budget
        self._batches: Generator[dict] | None = None
        self.start_at(self.START)

    def position(self, updates: int) -> dict:
        """Where the window began that holds the batch after so many updates, for `start_at`; for JSON."""
        begun = sum(position["updates"] <= updates for position in self._positions)
        self._positions = self._positions[begun - 1 :]
        return self._positions[0]

    def start_at(self, position: dict) -> None:
        """Begin at a window, the next time, without reading what is before it. The batches before it are empty: the
        Trainer skips as many as it has learned from."""
        self._start, self._positions = position, [dict(position)]

    def __iter__(self) -> Iterator[dict]:
        self._batches = self._passes()
        return self._batches

    def close(self) -> None:
        """End the pass that is read, as where a run is over; the stream then reports what it has dropped."""
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
            for window, behind in self._windows(state):
                lengths = (np.array([pair[f"{side}_length"] for pair in window]) for side in ("source", "target"))
                sampler = TokenBudgetSampler(*lengths, **self.budget)
                sampler.set_epoch(windows)
                for batch in sampler:
                    yield self.collate([window[index] for index in batch])
                updates, windows, is_empty = updates + sampler.num_updates, windows + 1, False
                self._positions.append({"updates": updates, "windows": windows, "pairs": behind})
            if is_empty:
                raise ValueError("The training data is an empty stream.")
            self._positions[-1]["pairs"] = state = None  # the next pass

    def _windows(self, state: dict | None) -> Iterator[tuple[list[dict], dict | None]]:
        """The windows of a pass, or of what is left of it, each with the state of the stream behind it; the next is
        read while the model learns from one."""
        self.pairs.load_state_dict(state)
        is_closed = threading.Event()

        def read() -> tuple[list[dict], dict | None]:
            window = list(islice(takewhile(lambda _: not is_closed.is_set(), stream), self.window))
            return window, self.pairs.state_dict() if window else None

        with contextlib.closing(iter(self.pairs)) as stream, ThreadPoolExecutor(1) as reader:
            try:
                ahead = reader.submit(read)
                while (found := ahead.result())[0]:
                    ahead = reader.submit(read)
                    yield found
            finally:
                is_closed.set()


class PairCollator:
    """Pads tokenised pairs to a batch.

    Args:
        pad_token_id (`int`): Fills the sources; the labels are filled with -100, which the loss ignores.
        eos_token_id (`int`): The only token of an empty batch.
    """

    def __init__(self, pad_token_id: int, eos_token_id: int):
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id

    def __call__(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` of shape `(batch, source)`, `labels` of shape `(batch, target)`."""
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
