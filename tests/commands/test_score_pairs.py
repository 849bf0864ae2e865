import json

import pytest
import torch

from support.models import noisy_translator
from training.cli import main
from training.inference.forced_decoding import token_log_probabilities


@pytest.fixture(scope="module")
def texts(pairs):
    return [source for source, _ in pairs[:9]], [target for _, target in pairs[:9]]


@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
@torch.no_grad()
def test_a_pairs_score_is_minus_its_loss(tokenizer, texts, batch_tokens):
    model = noisy_translator(tokenizer)
    results = token_log_probabilities(model, tokenizer, *texts, batch_tokens=batch_tokens)
    assert len(results) == 9
    for source, target, numbers in zip(*texts, results):
        inputs, labels = tokenizer(source, return_tensors="pt"), tokenizer(target, return_tensors="pt")["input_ids"]
        assert len(numbers) == labels.shape[1]
        assert sum(numbers) == pytest.approx(-model(**inputs, labels=labels).loss.item() * len(numbers), abs=1e-3)


@torch.no_grad()
def test_probabilities_of_all_that_may_follow_sum_to_one(tokenizer):
    """Over every single token that the translation may consist of."""
    model = noisy_translator(tokenizer)
    inputs = tokenizer("a dog", return_tensors="pt")
    start = torch.tensor([[model.config.decoder_start_token_id]])
    probabilities = model(**inputs, decoder_input_ids=start).logits[0, 0].softmax(-1)
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-4)
    text = tokenizer.decode([300])
    first = tokenizer(text)["input_ids"][0]
    [[number, *_]] = token_log_probabilities(model, tokenizer, ["a dog"], [text])
    assert number == pytest.approx(probabilities[first].log().item(), abs=1e-4)


def test_the_command_prints_a_line_a_pair(tokenizer, texts, tmp_path, capsys):
    noisy_translator(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sources, translations = texts
    (tmp_path / "en").write_text("\n".join(sources) + "\n", encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(translations) + "\n", encoding="utf-8")
    words = ["score-pairs", "--model", str(tmp_path / "model"), "--sources", str(tmp_path / "en")]
    words += ["--translations", str(tmp_path / "de")]
    assert main(words) == 0
    totals = [float(line) for line in capsys.readouterr().out.splitlines()]
    expected = token_log_probabilities(noisy_translator(tokenizer), tokenizer, *texts)
    assert totals == pytest.approx([sum(numbers) for numbers in expected], abs=1e-3)
    assert main([*words, "--tokens"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["log_probability"] for line in lines] == pytest.approx(totals, abs=1e-3)
    text = "".join(token for token, _ in lines[0]["tokens"][:-1])
    assert text.strip() == translations[0]
    assert lines[0]["tokens"][-1][0] == tokenizer.eos_token


def test_files_that_do_not_match_are_refused(tokenizer, tmp_path, capsys):
    (tmp_path / "en").write_text("one\ntwo\n")
    (tmp_path / "de").write_text("eins\n")
    words = ["score-pairs", "--model", "x", "--sources", str(tmp_path / "en"), "--translations", str(tmp_path / "de")]
    assert main(words) == 1
    assert "has 1 lines" in capsys.readouterr().err
