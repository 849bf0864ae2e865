import io
import signal
import subprocess
import sys

import pytest
import torch
from conftest import tiny_model
from transformers import GenerationConfig

from hf_vaswani import VaswaniForConditionalGeneration
from training.cli import main
from training.train import GENERATION
from training.translate import token_batches, translate, translate_lines


def noisy_model(tokenizer) -> VaswaniForConditionalGeneration:
    """A random model whose translations are noise, but different noise for each sentence."""
    model = tiny_model(vocab_size=len(tokenizer))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)))
    model.generation_config = GenerationConfig(
        bos_token_id=1, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, **{**GENERATION, "num_beams": 2}
    )
    return model


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    noisy_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(pairs):
    return [english for english, _ in pairs[:25]]


def one_by_one(tokenizer, sentences) -> list[str]:
    model = noisy_model(tokenizer)
    return [translate(model, tokenizer, [sentence])[0] for sentence in sentences]


def test_batches_hold_every_sentence_within_the_budget():
    lengths = [5, 1, 9, 0, 5, 30, 2, 2, 7, 0]
    batches = list(token_batches(lengths, budget=20))
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 4, 5, 6, 7, 8]  # 3 and 9 are empty
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= 20 or batch == [5]  # 30 tokens stand alone


@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_order_and_result_do_not_depend_on_the_batches(tokenizer, sentences, budget):
    model = noisy_model(tokenizer)
    translations = translate(model, tokenizer, sentences, batch_tokens=budget)
    assert translations == one_by_one(tokenizer, sentences)
    assert len(set(translations)) > 5


def test_an_empty_sentence_gives_an_empty_translation(tokenizer, sentences):
    model = noisy_model(tokenizer)
    translations = translate(model, tokenizer, ["", sentences[0], "  "], max_new_tokens=4)
    assert (translations[0], translations[2]) == ("", "")
    assert translations[1]
    assert translate(model, tokenizer, []) == []


def test_a_stream_is_translated_window_by_window(tokenizer, sentences):
    model = noisy_model(tokenizer)
    seen = []

    def lines():
        for sentence in sentences:
            seen.append(sentence)
            yield sentence

    stream = translate_lines(model, tokenizer, lines(), window=10)
    first = next(stream)
    assert len(seen) == 10  # no further than it has to
    assert [first, *stream] == one_by_one(tokenizer, sentences)


def test_command_translates_files_and_streams(checkpoint, tokenizer, sentences, tmp_path, monkeypatch, capsys):
    text = "".join(line + "\n" for line in [*sentences, "", sentences[0]])
    source, output = tmp_path / "in.en", tmp_path / "out.de"
    source.write_text(text, encoding="utf-8")
    assert main(["translate", "--model", str(checkpoint), "--input", str(source), "--output", str(output)]) == 0
    lines = output.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 28
    assert (lines[25], lines[26], lines[27]) == ("", lines[0], "")
    assert not list(tmp_path.glob("*.partial"))

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8"))))
    capsys.readouterr()
    assert main(["translate", "--model", str(checkpoint), "--window", "7"]) == 0
    assert capsys.readouterr().out == output.read_text(encoding="utf-8")


def test_a_failed_translation_leaves_the_old_output(checkpoint, tmp_path, capsys):
    source, output = tmp_path / "in.en", tmp_path / "out.de"
    source.write_bytes(b"A dog.\nA \xff cat.\n")
    output.write_text("precious")
    assert main(["translate", "--model", str(checkpoint), "--input", str(source), "--output", str(output)]) == 1
    assert "in.en:2: byte 0xff" in capsys.readouterr().err
    assert output.read_text() == "precious"


def test_an_interrupted_translation_goes_on_where_it_was(checkpoint, sentences, tmp_path, capsys):
    source, output, whole = tmp_path / "in.en", tmp_path / "out.de", tmp_path / "whole.de"
    source.write_text("".join(line + "\n" for line in sentences), encoding="utf-8")
    words = ["translate", "--model", str(checkpoint), "--input", str(source), "--window", "4", "--output"]
    assert main([*words, str(whole)]) == 0
    expected = whole.read_text(encoding="utf-8")

    # Killed after ten lines and a half.
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_AFTER_TEN_LINES, *words, str(output)], stderr=subprocess.PIPE, text=True
    )
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    process.stderr.close()
    assert not output.exists()
    partial = tmp_path / "out.de.partial"
    lines = partial.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 11 and lines[-1] == "half a li"

    assert main([*words, str(output)]) == 1
    assert "out.de.partial holds an earlier run: pass --resume" in capsys.readouterr().err
    assert main([*words, str(output), "--resume", "--num-beams", "3"]) == 1
    assert "is of another run: options ({}, now {'num_beams': 3})" in capsys.readouterr().err
    assert main([*words, str(output), "--resume"]) == 0
    assert output.read_text(encoding="utf-8") == expected
    assert {path.name for path in tmp_path.iterdir()} == {"in.en", "out.de", "whole.de"}
    assert main([*words, str(output), "--resume"]) == 1
    assert "there is no" in capsys.readouterr().err


KILLED_AFTER_TEN_LINES = """
import os, signal, sys
from training import translate
from training.cli import main

write, written = translate.PartialOutput.write, []

def write_ten(self, text):
    if len(written) == 10:
        self.file.write("half a li")
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(text)
    write(self, text)

translate.PartialOutput.write = write_ten
main(sys.argv[1:])
"""


@pytest.mark.parametrize("option", ["--window", "--batch-tokens", "--num-beams"])
def test_a_number_that_makes_no_sense_is_refused(checkpoint, tmp_path, capsys, option):
    output = tmp_path / "out.de"
    output.write_text("precious")
    with pytest.raises(SystemExit):
        main(["translate", "--model", str(checkpoint), "--output", str(output), option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
    assert output.read_text() == "precious"


def test_a_sentence_beyond_learned_positions_is_named(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=12)
    with pytest.raises(ValueError, match=r"A sentence has \d+ tokens, and .* end at 12: 'one two three"):
        translate(model, tokenizer, ["A dog.", "one two three four five six seven eight nine ten"])


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint, tokenizer, tmp_path, capsys):
    tiny_model(vocab_size=50).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "in").write_text("A dog.\n")
    assert main(["translate", "--model", str(tmp_path), "--input", str(tmp_path / "in")]) == 1
    assert f"the tokenizer has {len(tokenizer)} tokens, the model 50" in capsys.readouterr().err
