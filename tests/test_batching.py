import os
from itertools import pairwise

import numpy as np
import pytest
import torch

from training.batching import PairCollator, TokenBudgetSampler, TokenBudgetStream
from training.data import lengths, load_pairs, tokenize
from training.tokenizer import train_tokenizer


def random_lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(3, 0.6, count), 1, 100).astype(np.int32)
    target = np.clip(source * rng.normal(1.05, 0.2, count), 1, 100).astype(np.int32)
    return source, target


SOURCE, TARGET = random_lengths(5000)


def sampler(**kwargs) -> TokenBudgetSampler:
    return TokenBudgetSampler(SOURCE, TARGET, **{"source_budget": 500, "target_budget": 400, **kwargs})


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_respect_both_budgets_and_hold_every_pair_once(accumulation, shuffle):
    batches = list(sampler(accumulation=accumulation, shuffle=shuffle))
    for batch in filter(None, batches):
        assert SOURCE[batch].max() * len(batch) <= 500
        assert TARGET[batch].max() * len(batch) <= 400
    assert sorted(i for batch in batches for i in batch) == list(range(5000))
    assert len(batches) == len(sampler(accumulation=accumulation))
    assert sum(not batch for batch in batches) < accumulation


def test_batches_are_full():
    """No batch could take the pair that follows it in length order, so there are not more batches than needed."""
    batches = list(sampler(shuffle=False))
    for batch, following in pairwise(batches):
        with_next = [*batch, following[0]]
        too_long = SOURCE[with_next].max() * len(with_next) > 500 or TARGET[with_next].max() * len(with_next) > 400
        assert too_long


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_devices_and_accumulation_share_the_same_updates(replicas, accumulation):
    def updates(replicas, accumulation):
        devices = [
            list(sampler(num_replicas=replicas, rank=rank, accumulation=accumulation)) for rank in range(replicas)
        ]
        steps = [devices[0][i : i + accumulation] for i in range(0, len(devices[0]), accumulation)]
        assert all(len(device) == len(devices[0]) for device in devices)
        return [
            sorted(
                i for device in devices for batch in device[s * accumulation : (s + 1) * accumulation] for i in batch
            )
            for s in range(len(steps))
        ]

    assert updates(replicas, accumulation) == updates(1, 4)
    assert sampler(num_replicas=replicas, accumulation=accumulation).num_updates == len(updates(1, 4))


def test_order_depends_on_seed_and_epoch_alone():
    def epoch(seed, number):
        s = sampler(seed=seed)
        s.set_epoch(number)
        return list(s)

    assert epoch(1, 2) == epoch(1, 2)
    assert epoch(1, 2) != epoch(1, 3)
    assert epoch(1, 2) != epoch(2, 2)
    assert len(epoch(1, 2)) == len(epoch(1, 3)) == len(sampler())


def test_batches_change_between_epochs_not_only_their_order():
    s = sampler()
    first = {tuple(sorted(batch)) for batch in s}
    s.set_epoch(1)
    second = {tuple(sorted(batch)) for batch in s}
    assert len(first & second) < len(first) / 2


def test_padding_share_is_that_of_the_batches():
    padded = real = 0
    for batch in sampler():
        padded += (SOURCE[batch].max() + TARGET[batch].max()) * len(batch)
        real += SOURCE[batch].sum() + TARGET[batch].sum()
    assert sampler().padding_share() == pytest.approx(1 - real / padded)


def test_a_stream_is_cut_into_the_same_kind_of_batches():
    pairs = [{"id": i, "source_length": SOURCE[i], "target_length": TARGET[i]} for i in range(1000)]

    def ids(batch):
        return [pair["id"] for pair in batch]

    budget = {"source_budget": 500, "target_budget": 400}
    devices = [
        iter(TokenBudgetStream(pairs, ids, window=300, num_replicas=2, rank=rank, **budget)) for rank in range(2)
    ]
    passes = []
    for _ in range(2):
        batches = []
        while sum(map(len, batches)) < 1000:
            batches += [next(device) for device in devices]
        assert sorted(i for batch in batches for i in batch) == list(range(1000))
        for batch in filter(None, batches):
            assert SOURCE[batch].max() * len(batch) <= 500
            assert TARGET[batch].max() * len(batch) <= 400
        passes.append(batches)
    assert passes[0] != passes[1]
    with pytest.raises(ValueError, match="empty stream"):
        next(iter(TokenBudgetStream([], ids, window=300, **budget)))


def test_a_pair_over_the_budget_is_named():
    with pytest.raises(ValueError, match="Pair 1 has 50 target tokens, and a batch only 40"):
        TokenBudgetSampler(np.array([3, 4]), np.array([5, 50]), 40, 40)


def test_collator_pads_and_masks():
    collate = PairCollator(pad_token_id=0, eos_token_id=2)
    batch = collate([{"input_ids": [5, 2], "labels": [7, 8, 2]}, {"input_ids": [5, 6, 2], "labels": [2]}])
    assert batch["input_ids"].tolist() == [[5, 2, 0], [5, 6, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[7, 8, 2], [2, -100, -100]]
    assert all(tensor.dtype == torch.long for tensor in batch.values())


def test_an_empty_batch_counts_nothing():
    batch = PairCollator(pad_token_id=0, eos_token_id=2)([])
    assert batch["input_ids"].tolist() == [[2]]
    assert batch["labels"].tolist() == [[-100]]


@pytest.mark.slow
def test_padding_on_multi30k_is_below_8_percent():
    folder = os.environ.get("MULTI30K")
    if not folder:
        pytest.skip("MULTI30K does not name the folder of Multi30k")
    dataset = load_pairs([f"{folder}/train.en.gz", f"{folder}/train.de.gz"], "en", "de")
    tokenizer = train_tokenizer([*dataset["source"], *dataset["target"]], 10_000, show_progress=False)
    s = TokenBudgetSampler(*lengths(tokenize(dataset, tokenizer)), 2048, 2048)
    assert s.padding_share() < 0.08
