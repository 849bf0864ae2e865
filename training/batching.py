"""Batches as budgets of tokens on both sides (section 5.1), formed from pairs of similar length.

An *update*, what one optimiser step learns from, consists of *parts*: batches of pairs of similar length, as many as
fit a source and a target budget. A device takes one part at a time; `devices × accumulation` of them are an update.
Parts and their order depend on the lengths, the seed and the epoch alone, so that 1 device × k accumulated parts and
k devices × 1 part learn from the same pairs, update by update.
"""

from collections.abc import Iterable
from itertools import islice

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
        parts = list(self.parts())
        for first in range(self.rank, len(self) * self.num_replicas, self.num_replicas):
            yield parts[first].tolist() if first < len(parts) else []

    def parts(self):
        """The epoch's parts, in order, for all devices: index arrays of shape `(pairs of the part,)`."""
        random = np.random.default_rng((self.seed, self.epoch))
        by_length = self._by_length(random.permutation(len(self.source_lengths)) if self.shuffle else None)
        count = len(self._bounds) - 1
        for part in random.permutation(count) if self.shuffle else range(count):
            yield by_length[self._bounds[part] : self._bounds[part + 1]]

    def _by_length(self, ties: np.ndarray | None = None) -> np.ndarray:
        """All pairs in length order; `ties` orders pairs of the same lengths."""
        up_and_down = np.where(self.target_lengths % 2, self.source_lengths, -self.source_lengths)
        keys = (up_and_down, self.target_lengths)  # the last key is the first to count
        return np.lexsort(keys if ties is None else (ties, *keys))

    def _part_bounds(self) -> np.ndarray:
        """Where the parts begin and end in length order; the same every epoch, since only ties change places."""
        by_length = self._by_length()
        source, target = self.source_lengths[by_length], self.target_lengths[by_length]
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
        by_length, starts, sizes = self._by_length(), self._bounds[:-1], np.diff(self._bounds)
        both = (self.source_lengths, self.target_lengths)
        padded = sum(int((np.maximum.reduceat(side[by_length], starts) * sizes).sum()) for side in both)
        return 1 - sum(int(side.sum()) for side in both) / padded


class TokenBudgetStream(IterableDataset):
    """The batches that one device sees of pairs that are read as a stream, pass after pass without an end.

    A window of pairs at a time is cut into batches as `TokenBudgetSampler` does. Every device reads the whole stream
    and takes its share of each window.

    Args:
        pairs (`datasets.IterableDataset`): From `data.tokenize`.
        collate (`PairCollator`): Makes a batch of the pairs chosen.
        window (`int`): Pairs in memory.
        **budget: As for `TokenBudgetSampler`.

    Raises:
        ValueError: The stream is empty, or a pair alone is over a budget.
    """

    def __init__(self, pairs: Iterable[dict], collate: "PairCollator", window: int, **budget):
        self.pairs, self.collate, self.window, self.budget = pairs, collate, window, budget

    def __iter__(self):
        windows = 0
        while True:
            before, stream = windows, iter(self.pairs)
            while window := list(islice(stream, self.window)):
                lengths = (np.array([pair[f"{side}_length"] for pair in window]) for side in ("source", "target"))
                sampler = TokenBudgetSampler(*lengths, **self.budget)
                sampler.set_epoch(windows)
                for batch in sampler:
                    yield self.collate([window[index] for index in batch])
                windows += 1
            if windows == before:
                raise ValueError("The training data is an empty stream.")


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
