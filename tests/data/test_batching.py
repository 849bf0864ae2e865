import json
import os
import threading
import tracemalloc
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from datasets import Features, IterableDataset, Value

from support.runs import make_trainer
from training.data.batching import PairCollator, TokenBudgetSampler, TokenBudgetStream
from training.data.encoding import FilteredStream, lengths, tokenize
from training.data.pairs import load_pairs
from training.data.tokenizer import train_tokenizer


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


def test_without_shuffling_pairs_are_in_length_order_and_within_it_in_data_order():
    order = [index for batch in sampler(shuffle=False) for index in batch]
    assert order == np.lexsort((np.where(TARGET % 2, SOURCE, -SOURCE), TARGET)).tolist()


def test_lengths_of_any_integer_type_give_the_same_batches():
    """Also unsigned ones, of which no negative can be taken, and ones too short for the sum of the lengths."""
    expected = list(sampler())
    for kind in (np.uint8, np.int16, np.int64):
        assert list(TokenBudgetSampler(SOURCE.astype(kind), TARGET.astype(kind), 500, 400)) == expected
    assert sampler().padding_share() == pytest.approx(
        TokenBudgetSampler(SOURCE.astype(np.uint8), TARGET.astype(np.uint8), 500, 400).padding_share()
    )


def test_batches_of_an_epoch_take_few_bytes_a_pair():
    """Beside the lengths; a Python integer alone would be 32, and 8 in its list."""
    source, target = random_lengths(200_000)
    tracemalloc.start()
    try:
        s = TokenBudgetSampler(source, target, 500, 500)
        assert sum(map(len, s)) == 200_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * 200_000


def test_padding_share_is_that_of_the_batches():
    padded = real = 0
    for batch in sampler():
        padded += (SOURCE[batch].max() + TARGET[batch].max()) * len(batch)
        real += SOURCE[batch].sum() + TARGET[batch].sum()
    assert sampler().padding_share() == pytest.approx(1 - real / padded)


def numbered(count: int, read: list | None = None) -> IterableDataset:
    """A stream of pairs with nothing but numbers and lengths; which of them are processed is added to `read`."""

    def generate():
        yield from ({"id": i, "source_length": SOURCE[i], "target_length": TARGET[i]} for i in range(count))

    def process(batch):
        if read is not None:
            read.extend(batch["id"])
        return batch

    features = Features({name: Value("int64") for name in ("id", "source_length", "target_length")})
    stream = IterableDataset.from_generator(generate, features=features)
    return stream.map(process, batched=True, batch_size=100)


def ids(batch) -> list[int]:
    return [pair["id"] for pair in batch]


def test_a_stream_is_cut_into_the_same_kind_of_batches():
    budget = {"source_budget": 500, "target_budget": 400}
    devices = [
        iter(TokenBudgetStream(numbered(1000), ids, window=300, num_replicas=2, rank=rank, **budget))
        for rank in range(2)
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
        next(iter(TokenBudgetStream(numbered(0), ids, window=300, **budget)))


@pytest.mark.parametrize("pairs", [1000, 900])
@pytest.mark.parametrize("updates", [1, 5, 14, 30])
def test_a_stream_goes_on_from_a_window_without_reading_what_was_before(pairs, updates):
    """900 pairs are whole windows: the position may be at the end of a pass."""
    budget = {"window": 300, "source_budget": 500, "target_budget": 400, "accumulation": 4}
    stream = TokenBudgetStream(numbered(pairs), ids, **budget)
    whole = list(islice(stream, 4 * 60))
    stream = TokenBudgetStream(numbered(pairs), ids, **budget)
    for _ in islice(stream, 4 * updates + 3):  # the next update is being put together
        pass
    position = json.loads(json.dumps(stream.position(updates)))
    assert position["updates"] <= updates

    read = []
    resumed = TokenBudgetStream(numbered(pairs, read), ids, **budget)
    resumed.start_at(position)
    again = list(islice(resumed, 4 * 60))
    assert again[: 4 * position["updates"]] == [[]] * 4 * position["updates"]
    assert again[4 * position["updates"] :] == whole[4 * position["updates"] :]
    assert list(islice(resumed, 20)) == whole[:20]  # from the start, once it has gone on
    start = min(300 * (position["windows"] % -(-pairs // 300)), pairs) or (pairs if position["windows"] else 0)
    assert start - 100 <= read[0] <= start  # pairs are processed a hundred at a time


def test_every_update_finds_the_window_that_it_is_in():
    stream = TokenBudgetStream(numbered(1000), ids, window=30, source_budget=500, target_budget=400, accumulation=2)
    batches, windows = iter(stream), []
    for update in range(60):
        assert len(list(islice(batches, 2))) == 2
        windows.append(stream.position(update)["windows"])
        assert stream.position(update)["updates"] <= update
    assert windows[0] == 0
    assert {after - before for before, after in pairwise(windows)} == {0, 1}


def test_the_next_window_is_read_while_one_is_learned_from():
    further, waiting, before = threading.Event(), threading.Event(), set(threading.enumerate())

    def generate():
        for i in range(900):
            if i == 600:
                further.set()
                waiting.wait(30)
            yield {"id": i, "source_length": SOURCE[i], "target_length": TARGET[i]}

    pairs = IterableDataset.from_generator(generate)
    batches = iter(TokenBudgetStream(pairs, ids, window=400, source_budget=500, target_budget=400))
    first = next(batches)
    assert first
    assert max(first) < 400
    assert further.wait(30)
    waiting.set()
    batches.close()  # as at the end of a training: nobody reads on
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def sentences_of(batch) -> list[tuple]:
    """The pairs of a batch, as token ids without padding."""
    ids, mask, labels = (batch[name].tolist() for name in ("input_ids", "attention_mask", "labels"))
    pairs = [
        (tuple(i for i, m in zip(*row[:2]) if m), tuple(t for t in row[2] if t >= 0)) for row in zip(ids, mask, labels)
    ]
    return [pair for pair in pairs if pair[1]]


@pytest.mark.parametrize("shards", [4, 3])
def test_two_devices_share_a_stream(tmp_path, tokenizer, pairs, monkeypatch, shards):
    """Four shards are divided, three are read by both; either way every pair is learned from once in a pass."""
    opened = []

    def read(shard):
        for number in shard:
            opened.append(number)
            yield from ({"source": source, "target": target} for source, target in pairs[number:280:shards])

    stream = IterableDataset.from_generator(read, gen_kwargs={"shard": list(range(shards))})
    rows = list(tokenize(stream, tokenizer))
    expected = Counter((tuple(row["input_ids"]), tuple(row["labels"])) for row in rows)
    trainer = make_trainer(tmp_path, tokenizer, pairs, gradient_accumulation_steps=2)
    trainer.train_dataset, trainer._stream_window = FilteredStream(tokenize(stream, tokenizer)), 50
    budget, seen, reads, updates = trainer._budget(), [Counter(), Counter()], [], []
    for rank in range(2):
        monkeypatch.setattr(trainer, "_budget", lambda rank=rank: {**budget, "num_replicas": 2, "rank": rank})
        opened.clear()
        whole_pass = []
        for batch in trainer.get_train_dataloader():
            if len(opened) > len(set(opened)):  # the next pass
                break
            whole_pass.append(sentences_of(batch))
        seen[rank].update(pair for batch in whole_pass for pair in batch)
        reads.append(set(opened))
        updates.append(list(islice(trainer.get_train_dataloader(), 120)))
    if shards == 4:
        assert [len(read) for read in reads] == [2, 2]
        assert reads[0] | reads[1] == {0, 1, 2, 3}
    else:
        assert reads == [{0, 1, 2}] * 2
    assert seen[0] + seen[1] == expected
    for mine, theirs in zip(*updates):  # devices that are out of step by a pass, or by a batch, still go on together
        assert mine.keys() == theirs.keys()
    for first in range(0, 120, 2):
        assert any(sentences_of(batch) for device in updates for batch in device[first : first + 2])


def test_a_pair_over_the_budget_is_named():
    with pytest.raises(ValueError, match=r"Pair 1 has 50 target tokens.* 40 "):
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
def test_padding_on_multi30k_is_below_3_percent():
    folder = os.environ.get("MULTI30K")
    if not folder:
        pytest.skip("MULTI30K does not name the folder of Multi30k")
    dataset = load_pairs([f"{folder}/train.en.gz", f"{folder}/train.de.gz"], "en", "de")
    tokenizer = train_tokenizer([*dataset["source"], *dataset["target"]], 10_000, show_progress=False)
    s = TokenBudgetSampler(*lengths(tokenize(dataset, tokenizer)), 2048, 2048)
    assert s.padding_share() < 0.03
