"""Batches of sentences for decoding: of similar length, shared among processes and threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch


Batch, Result = TypeVar("Batch"), TypeVar("Result")


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


def share_of_batches(batches: list[list[int]], lengths: list[int], rank: int, processes: int) -> list[list[int]]:
    """The batches that one of several processes takes, so that all have about as many tokens to do, with padding.

    The largest batch goes first, each to the process that has least so far; every process finds the same.

    Args:
        batches (`list[list[int]]`): Indices of `lengths`, as of `token_batches`.
        lengths (`list[int]`): Tokens of every sentence.
        rank, processes (`int`): Which process of how many.

    >>> [share_of_batches([[0], [1, 2], [3]], [9, 4, 3, 1], rank, 2) for rank in (0, 1)]
    [[[0]], [[1, 2], [3]]]
    """
    sizes = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    loads, shares = [0] * processes, [[] for _ in range(processes)]
    for index in sorted(range(len(batches)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        loads[least] += sizes[index]
        shares[least].append(batches[index])
    return shares[rank]


def by_threads(work: Callable[[Batch], Result], batches: list[Batch], device: torch.device) -> Iterator[Result]:
    """Results of `work` on every batch, in order.

    On a CPU several batches are worked on at once, each with its share of torch's threads: the small products of a
    decoder's step are done faster side by side than split between threads. The weights are there once.

    Args:
        work (`Callable`): What to do, of which two may run at the same time.
        batches (`list`): What to do it with, the longest work first.
        device (`torch.device`): Where it is done.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(batches)) if device.type == "cpu" else 1
    if workers < 2:
        yield from map(work, batches)
        return

    def with_its_share(batch: Batch) -> Result:
        torch.set_num_threads(threads // workers)
        return work(batch)

    try:
        with ThreadPoolExecutor(workers) as executor:
            yield from executor.map(with_its_share, batches)
    finally:
        torch.set_num_threads(threads)
