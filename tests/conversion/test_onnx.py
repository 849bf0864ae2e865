"""ONNX graphs on onnxruntime give what the model gives in PyTorch."""

import importlib
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration

from support.foreign_models import marian_model
from support.models import new_model, strong_model, tiny_model
from support.paths import ROOT
from training.cli import main


PACKAGES = ("onnxscript", "onnx_ir", "onnx_ir.passes", "onnx_ir.passes.common", "onnxruntime")
EXTRA = "needs pip install 'hf-vaswani[onnx]'"
LENGTHS = ([1], [33], [33, 5], [2, 33, 1, 20, 7, 12])
NEW_TOKENS = 20
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture
def without_packages(monkeypatch):
    """Environment in which the modules of ONNX must be imported anew, and whose packages are empty."""
    for name in ("onnx", "onnx_greedy"):
        monkeypatch.delitem(sys.modules, f"training.conversion.{name}", raising=False)
    for name in PACKAGES:
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(ClearMetadataAndDocStringPass=None, InferenceSession=None)
        )
    names = ("ExportedModel", "ExportFormat", "OnnxConfig", "OnnxExporter")
    monkeypatch.setitem(sys.modules, "transformers.exporters", SimpleNamespace(**dict.fromkeys(names)))
    yield monkeypatch
    for name in ("onnx", "onnx_greedy"):
        monkeypatch.delitem(sys.modules, f"training.conversion.{name}", raising=False)


def error_of_convert(tokenizer, folder, capsys) -> str:
    new_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    assert main(["convert", str(folder / "model"), str(folder / "output"), "--to", "onnx"]) == 1
    assert [path.name for path in folder.iterdir()] == ["model"]
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-vaswani convert: ")]
    return line


@pytest.mark.parametrize("package", ["onnxscript", "onnx_ir", "onnxruntime"])
def test_without_the_packages_the_extra_is_named(package, without_packages, tokenizer, tmp_path, capsys):
    for name in PACKAGES:
        if name.partition(".")[0] == package:
            without_packages.setitem(sys.modules, name, None)
    error = error_of_convert(tokenizer, tmp_path, capsys)
    assert "pip install 'hf-vaswani[onnx]'" in error and package in error


def test_an_older_transformers_is_named(without_packages, tokenizer, tmp_path, capsys):
    without_packages.setitem(sys.modules, "transformers.exporters", SimpleNamespace(OnnxExporter=None))
    without_packages.setattr(transformers, "__version__", "5.22.2")
    error = error_of_convert(tokenizer, tmp_path, capsys)
    assert "transformers 5.23" in error and "5.22.2" in error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_position_embeddings": 3}, "max_position_embeddings: .*4.* 3"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "decoder_start_token_id: "),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_by_field(overrides, words, without_packages, tokenizer, tmp_path):
    module = importlib.import_module("training.conversion.onnx")
    with pytest.raises(ValueError, match=words):
        module.write(tiny_model(vocab_size=len(tokenizer), **overrides), tokenizer, tmp_path / "onnx")
    assert not list(tmp_path.iterdir())


def test_other_models_and_8_bit_models_are_refused(without_packages, tokenizer, tmp_path):
    module = importlib.import_module("training.conversion.onnx")
    with pytest.raises(ValueError, match="to_int8"):
        module.write(tiny_model(vocab_size=len(tokenizer)).to_int8(), tokenizer, tmp_path / "onnx")
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **sizes, **heads))
    with pytest.raises(ValueError, match="BartForConditionalGeneration"):
        module.write(bart, tokenizer, tmp_path / "onnx")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def check_greedy(folder, model, size: int) -> None:
    """Assert that onnxruntime translates random sentences as the greedy search of `generate()` does, and that its
    logits of random translations are the model's. `size`: of the source vocabulary."""
    pytest.importorskip("onnxruntime", reason=EXTRA)
    from training.conversion.onnx_greedy import OnnxTranslator

    translator, translations, size_of_target = OnnxTranslator(folder), set(), model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    for lengths in LENGTHS:
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(3, size, mask.shape, generator=generator) * mask
        limits = {"max_new_tokens": NEW_TOKENS, "max_extra_tokens": None, "max_length": None}
        limits |= {"num_beams": 1, "forced_eos_token_id": None}
        expected = model.generate(input_ids=ids, attention_mask=mask, **limits)[:, 1:]
        found = translator(ids.numpy(), mask.numpy(), NEW_TOKENS)
        assert found.tolist() == expected.tolist()
        translations |= {tuple(row) for row in found.tolist()}

        targets = torch.randint(3, size_of_target - 1, (len(lengths), NEW_TOKENS), generator=generator)
        start = torch.full((len(lengths), 1), model.config.decoder_start_token_id)
        logits = model(ids, mask, decoder_input_ids=torch.cat((start, targets), dim=1)).logits
        step, inputs = translator.first(ids.numpy(), mask.numpy())
        for position, expected in enumerate(logits.unbind(1)):
            torch.testing.assert_close(
                torch.from_numpy(step), expected, rtol=0, atol=1e-4 * float(expected.abs().max())
            )
            if position < NEW_TOKENS:
                step, inputs = translator.next(targets[:, position].numpy(), inputs)
    assert len(translations) >= 5  # they differ


def check_example(folder, model, tokenizer) -> None:
    """Assert that a copy of the example translates lines, where neither PyTorch nor transformers is installed."""
    shutil.copy(ROOT / "training" / "conversion" / "onnx_greedy.py", folder.parent / "mine.py")
    for name in ("torch", "transformers", "hf_vaswani"):
        (folder.parent / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    lines = ["The old man gives the child a book.", "", "A dog sleeps."]
    run = subprocess.run(
        [sys.executable, "mine.py", folder],
        cwd=folder.parent,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    for line, found in zip(lines, run.stdout.splitlines(), strict=True):
        ids = torch.tensor([tokenizer(line)["input_ids"]])
        limits = {"max_new_tokens": ids.numel() + 50, "max_extra_tokens": None, "max_length": None}
        tokens = model.generate(ids, num_beams=1, forced_eos_token_id=None, **limits)[0, 1:]
        assert found == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"d_k": 8, "d_v": 8},
        {"d_k": 4, "d_v": 6, **ONE_LAYER},
        {"position_embedding": "learned", "max_position_embeddings": 40, **ONE_LAYER},
        {"output_bias": True, "attention_bias": True, "tie_word_embeddings": False, **ONE_LAYER},
    ],
    ids=["as the paper's", "d_k != d_v", "learned positions", "biases, untied"],
)
def test_translations_are_those_of_generate(overrides, tokenizer, tmp_path):
    onnx = pytest.importorskip("training.conversion.onnx", reason=EXTRA, exc_type=ImportError)
    model = strong_model(len(tokenizer), **overrides)
    agreement = onnx.write(model, tokenizer, tmp_path / "onnx")
    assert agreement.equal == agreement.sentences == 8
    assert 0 < agreement.logits < 1e-4
    check_greedy(tmp_path / "onnx", model, len(tokenizer))


@pytest.mark.slow
def test_a_checkpoint_with_two_vocabularies_is_written_by_the_command(tokenizer, tmp_path, capsys):
    pytest.importorskip("training.conversion.onnx", reason=EXTRA, exc_type=ImportError)
    marian_model(source_vocab_size=len(tokenizer)).save_pretrained(tmp_path / "opus")
    tokenizer.save_pretrained(tmp_path / "opus")
    assert main(["convert", str(tmp_path / "opus"), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "onnx"), "--to", "onnx"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert "8 of 8 translations are equal" in line and "logits differ by at most" in line
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert model.config.source_vocab_size == len(tokenizer)
    check_greedy(tmp_path / "onnx", model, len(tokenizer))
    check_example(tmp_path / "onnx", model, tokenizer)
    settings = json.loads((tmp_path / "onnx" / "generation_config.json").read_text())
    assert settings["num_beams"] == model.generation_config.num_beams == 6
    for graph in ("encoder", "prefill", "decode"):
        assert str(ROOT).encode() not in (tmp_path / "onnx" / f"{graph}.onnx").read_bytes()
