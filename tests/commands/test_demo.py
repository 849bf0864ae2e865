"""The demo's language pair, learned: with the whole model, and with what the pair is made to need taken away."""

import json
from pathlib import Path

import pytest
import torch

from hf_vaswani import modeling_vaswani
from training.cli import main
from training.demo_data import write_demo_data
from training.evaluation.alignment_error import read_gold_links, score_alignments
from training.evaluation.modules import score
from training.inference.alignment import align
from training.inference.loading import load_checkpoint


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    files = write_demo_data(str(tmp_path_factory.mktemp("data")), test=200)
    return {split: [str(path) for path in paths] for split, paths in files.items()}


def bleu_on_unseen_sentences(data, folder: Path, *more: str) -> float:
    """Train as the demo does, average, translate the test sentences, score."""
    run, mean, output = str(folder / "run"), str(folder / "mean"), str(folder / "out.de")
    files = ["--train_files", *data["train"], "--eval_files", *data["val"]]
    assert main(["train", "--config", "demo", *files, "--output_dir", run, "--disable_tqdm", "true", *more]) == 0
    assert main(["average", "--run", run, "--last", "5", "--output", mean]) == 0
    assert main(["translate", "--model", mean, "--input", data["test"][0], "--output", output]) == 0
    return score(output, [data["test"][1]])["score"]


def test_the_demo_is_learned(data, tmp_path):
    assert bleu_on_unseen_sentences(data, tmp_path) > 95
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [entry["eval_bleu"] for entry in history if "eval_bleu" in entry][-1] > 95
    sources, translations = (Path(path).read_text(encoding="utf-8").splitlines() for path in data["test"])
    gold = read_gold_links(str(Path(data["test"][0]).with_suffix(".align")), sources, translations)
    model, tokenizer = load_checkpoint(str(tmp_path / "mean"))
    for method in ("attention", "erasure"):
        links = align(model, tokenizer, sources, translations, method=method)
        assert score_alignments(links, gold).error_rate < 0.1, method


def test_it_cannot_be_learned_without_positions(data, tmp_path, monkeypatch):
    def nothing(positions, d_model):
        return torch.zeros(*positions.shape, d_model)

    monkeypatch.setattr(modeling_vaswani, "sinusoids", nothing)
    assert bleu_on_unseen_sentences(data, tmp_path) < 60


def test_it_cannot_be_learned_without_attention(data, tmp_path, monkeypatch):
    """Every position then gets the same mean of all it may see."""
    attend = modeling_vaswani.eager_attention_forward

    def mean(module, query, key, value, *arguments, **kwargs):
        return attend(module, torch.zeros_like(query), key, value, *arguments, **kwargs)

    monkeypatch.setattr(modeling_vaswani, "eager_attention_forward", mean)
    assert bleu_on_unseen_sentences(data, tmp_path) < 60
