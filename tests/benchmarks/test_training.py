import json

import pytest
import torch

from hf_vaswani import VaswaniConfig
from support.models import tiny_config, tiny_model
from training.benchmarks import training
from training.benchmarks.peers import marian_like


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
        assert set(result["systems"]) == {"ours", "marian-random", "marian-grouped"}
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
