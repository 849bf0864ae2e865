"""Batches of sentences of similar length, and their distribution among processes and threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch


Batch = TypeVar("Batch")
Result = TypeVar("Result")


def token_batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Batches of indices of `lengths`, each of at most `budget` tokens with padding, longest sentences first.

    A sentence over the budget is a batch of its own. Empty sentences are left out.

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
    """Share of the batches for one process. All shares have about the same number of tokens, padding included.

    Batches are assigned greedily: the largest first, each to the least loaded process. The assignment is the same in
    every process.

    Args:
        batches (`list[list[int]]`): Batches of indices of `lengths`, as from `token_batches`.
        lengths (`list[int]`): Number of tokens of each sentence.
        rank, processes (`int`): Rank of the process, and number of processes.

    >>> [share_of_batches([[0], [1, 2], [3]], [9, 4, 3, 1], rank, 2) for rank in (0, 1)]
    [[[0]], [[1, 2], [3]]]
    """
    sizes = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    loads, shares = [0] * processes, [[] for _ in range(processes)]
    for index in sorted(range(len(batches)), key=lambda i: -sizes[i]):
        least_loaded = loads.index(min(loads))
        loads[least_loaded] += sizes[index]
        shares[least_loaded].append(batches[index])
    return shares[rank]


def by_threads(work: Callable[[Batch], Result], batches: list[Batch], device: torch.device) -> Iterator[Result]:
    """Apply `work` to each batch and yield the results in order.

    On a CPU, several batches run in parallel threads that share the model's weights, each with its share of torch's
    threads. The matrix products of a decoding step are too small to be split efficiently among threads.

    Args:
        work (`Callable`): Thread-safe function of a batch.
        batches (`list`): Batches, the most expensive first.
        device (`torch.device`): Device on which `work` runs.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(batches)) if device.type == "cpu" else 1
    if workers < 2:
        yield from map(work, batches)
        return

    def limited_work(batch: Batch) -> Result:
        torch.set_num_threads(threads // workers)
        return work(batch)

    try:
        with ThreadPoolExecutor(workers) as executor:
            yield from executor.map(limited_work, batches)
    finally:
        torch.set_num_threads(threads)
