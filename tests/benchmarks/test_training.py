import json
import multiprocessing
import threading
from itertools import islice

import pytest
import torch

from hf_vaswani import VaswaniConfig
from support.models import tiny_config, tiny_model
from training.benchmarks import toolkits, training
from training.benchmarks.peers import marian_like
from training.data.batching import PairCollator
from training.data.encoding import tokenize
from training.data.pairs import load_pairs


def test_a_token_takes_two_operations_a_weight_and_four_for_the_gradients():
    model = tiny_model(d_k=4, d_v=6)
    matrices = [weight for name, weight in model.model.named_parameters() if weight.dim() == 2]
    weights = sum(weight.numel() for weight in matrices)  # the embedding among them, as output projection
    assert training.operations(model.config, source=1, target=1) == 6 * weights
    decoder = sum(w.numel() for n, w in model.model.decoder.named_parameters() if w.dim() == 2 and "embed" not in n)
    keys_and_values = sum(
        w.numel()
        for n, w in model.model.decoder.named_parameters()
        if ".encoder_attn.k_" in n or ".encoder_attn.v_" in n
    )
    of_target = decoder - keys_and_values + model.model.shared.weight.numel()
    assert training.operations(model.config, source=0, target=10) == 60 * of_target


def test_the_peer_has_the_same_size():
    config = VaswaniConfig(vocab_size=100, d_model=32, d_ff=64, num_heads=4, d_k=8, d_v=8)
    marian = marian_like(config, max_positions=16)
    matrices = {n: w.numel() for n, w in marian.named_parameters() if w.dim() == 2 and "position" not in n}
    assert training.operations(config, source=1, target=1) == 6 * sum(matrices.values())


def test_counts_leave_out_padding():
    counts = training.Counts()
    counts.add({"attention_mask": torch.tensor([[1, 1, 0]]), "labels": torch.tensor([[5, -100]])})
    counts.add({"attention_mask": torch.tensor([[1, 1]]), "labels": torch.tensor([[5, 6]])})
    assert counts == training.Counts(source=4, target=3, places=9)


def test_figures_and_ratios_of_runs():
    config = tiny_config()
    runs = [(2.0, training.Counts(100, 100, 250)), (1.0, training.Counts(100, 100, 250))]
    ours = training.summary({"runs": runs, "memory": 2**21, "compiled": {}}, config, rate=1e9)
    assert (ours["target_tokens_per_second"], ours["range"], ours["padding_share"]) == (75.0, [50.0, 100.0], 0.2)
    assert ours["peak_memory_mb"] == 2
    half = {**ours, "target_tokens_per_second": 37.5, "peak_memory_mb": 4}
    found = training.ratios({"ours": ours, "marian-random": half})
    assert found == {"speed_vs_marian-random": 2.0, "memory_vs_marian-random": 0.5}


class Toolkit(torch.nn.Module):
    """A model of a toolkit whose loss is the number of target tokens, times one, plus its only weight."""

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, source, target):
        return (target[:, 1:] != toolkits.SHIFT).sum() * (1 + self.weight)


@pytest.fixture
def dataset(pairs, tokenizer, tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return tokenize(load_pairs([str(tmp_path / "train.tsv")], "source", "target"), tokenizer)


def converse(system, dataset, tokenizer, *numbers: int) -> list:
    """Answers of a toolkit's worker, in a thread, to numbers of updates."""
    here, there = multiprocessing.Pipe()
    args = {"threads": torch.get_num_threads(), "tokens": 200, "part_tokens": 100, "dtype": "float32"}
    inputs = (there, system, tiny_config(), dataset, tokenizer, args)
    worker = threading.Thread(target=training.work_toolkit, args=inputs)
    worker.start()
    answers = []
    for number in numbers:
        here.send(number)
        answers.append(here.recv())
    worker.join()
    return answers


def test_toolkits_count_the_tokens_of_the_updates_that_they_are_told_to_make(dataset, tokenizer, monkeypatch):
    monkeypatch.setitem(training.TOOLKITS, "joeynmt", Toolkit)
    (_, first), (seconds, second), (memory, _) = converse("joeynmt", dataset, tokenizer, 1, 2, 0)
    expected = []
    for batches in islice(toolkits.updates(dataset, tokenizer, 200, 100), 3):
        assert len(batches) == 2
        assert all(side.numel() <= 100 for batch in batches for side in batch.values())
        expected.append(sum(int((batch["labels"] != -100).sum()) for batch in batches))
    assert (first.target, second.target) == (expected[0], expected[1] + expected[2])
    assert seconds > 0 and memory > 0


def test_a_toolkit_that_is_not_installed_gives_the_reason(dataset, tokenizer, monkeypatch):
    def missing(config):
        raise ImportError("no such toolkit")

    monkeypatch.setitem(training.TOOLKITS, "eole", missing)
    assert converse("eole", dataset, tokenizer, 3) == ["no such toolkit"]


def test_updates_of_toolkits_never_end(dataset, tokenizer):
    of_an_epoch = sum(map(len, dataset["labels"])) // 200
    assert len(list(islice(toolkits.updates(dataset, tokenizer, 200, 100), 3 * of_an_epoch))) == 3 * of_an_epoch


def test_an_update_of_a_toolkit_takes_the_mean_over_its_target_tokens():
    model = Toolkit(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    pairs = [{"input_ids": [5, 2], "labels": [5, 6, 2]}, {"input_ids": [5, 6, 2], "labels": [2]}]
    toolkits.update(model, optimizer, [PairCollator(0, 2)([pair]) for pair in pairs], "float32")
    assert model.weight.item() == -1  # the sum over 4 tokens has the gradient 4


def test_ids_of_toolkits_are_shifted_by_the_unknown_token():
    pairs = [{"input_ids": [5, 2], "labels": [7, 6, 2]}, {"input_ids": [3, 4, 2], "labels": [2]}]
    source, target = toolkits.their_ids(PairCollator(0, 2)(pairs))
    assert source.tolist() == [[6, 3, 1], [4, 5, 3]]
    assert target.tolist() == [[2, 8, 7, 3], [2, 3, 1, 1]]


@pytest.mark.parametrize("name", ["joeynmt", "eole"])
def test_the_model_of_a_toolkit_has_the_same_size_and_ignores_padding(name):
    pytest.importorskip(name)
    config = VaswaniConfig(vocab_size=99, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=3)
    model = toolkits.TOOLKITS[name](config).eval()
    matrices = {n: w.numel() for n, w in model.named_parameters() if w.dim() == 2}
    assert training.operations(config, source=1, target=1) + 6 * 32 == 6 * sum(matrices.values())  # an unknown token
    source, target = torch.tensor([[6, 7, 3]]), torch.tensor([[2, 8, 7, 3]])
    wider = torch.nn.functional.pad(source, (0, 2), value=1), torch.nn.functional.pad(target, (0, 3), value=1)
    loss = model(source, target)
    torch.testing.assert_close(model(*wider), loss)
    assert 0 < loss.item() / 3 < 20


@pytest.mark.slow
def test_the_benchmark_ends_with_its_figures(pairs, tmp_path, capfd):
    (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    training.main(
        [
            *("--train-files", str(tmp_path / "train.tsv"), "--sizes", "tiny", "--dtypes", "float32", "bfloat16"),
            *("--tokens", "200", "--updates", "1", "--repeats", "1", "--threads", "1"),
        ]
    )
    figures = json.loads(capfd.readouterr().out.strip().splitlines()[-1])["results"]
    assert set(figures) == {"tiny-float32", "tiny-bfloat16"}
    for result in figures.values():
        assert {"ours", "marian-random", "marian-grouped"} <= set(result["systems"])
        assert set(result["systems"]) | set(result["skipped"]) == set(training.SYSTEMS)
        rates = {name: system["target_tokens_per_second"] for name, system in result["systems"].items()}
        assert result["speed_vs_marian-random"] == pytest.approx(rates["ours"] / rates["marian-random"], abs=0.01)
        assert all(0 < system["mfu"] < 1.2 for system in result["systems"].values())


def test_times_against_length_end_with_their_ratios(monkeypatch, capfd):
    monkeypatch.setattr(training, "LENGTHS", [16, 32])
    training.main(
        ["--lengths", "--sizes", "tiny", "--dtypes", "float32", "--tokens", "32", "--repeats", "1", "--threads", "1"]
    )
    figures = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    times, ratios = figures["milliseconds"]["tiny-float32"], figures["speed_vs_marian"]["tiny-float32"]
    assert set(times["ours"]) == set(times["marian"]) == set(ratios) == {"16", "32"}
    for length in ("16", "32"):
        for what in ("forward", "step"):
            ours, marian = times["ours"][length][what], times["marian"][length][what]
            assert ratios[length][what] == pytest.approx(marian / ours, abs=0.01)
        assert times["ours"][length]["step"] > 0
