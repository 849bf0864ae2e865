import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    MarianMTModel,
    MarianTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from support.foreign_models import fsmt_model, marian_model, padded_batch, relative_difference, translations
from support.marian_files import write_folder
from support.models import new_model
from support.sentencepiece_models import write_json, write_marian
from training.cli import main
from training.conversion import agreement, marian
from training.convert import QUANTIZATIONS
from training.demo_data import generate_pairs


def error_of(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("hf-vaswani convert: ")]
    assert len(errors) == 1
    return errors[0]


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture(scope="module")
def opus(tmp_path_factory, tokenizer):
    """A MarianMT checkpoint; its tokenizer is no SentencePiece model, and reads as many tokens as the model has."""
    folder = tmp_path_factory.mktemp("opus")
    marian_model(source_vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_complete", [True, False], ids=["", "a vocabulary that lacks a piece"])
def test_text_is_translated_as_by_the_original_from_its_sentencepiece_files(is_complete, tmp_path, capsys):
    """A piece without an id is `<unk>` to MarianTokenizer; the converted encoder has a row of its own for it."""
    folder, lines = tmp_path / "opus", [pair[0] for pair in generate_pairs(300)]
    folder.mkdir()
    write_marian(folder, lines, [pair[1] for pair in generate_pairs(300)])
    if not is_complete:
        ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        tokens = [token for token in sorted(ids, key=ids.get) if token != "▁the"]
        write_json(folder / "vocab.json", {token: i for i, token in enumerate(tokens)})
    original = MarianTokenizer.from_pretrained(folder)
    marian = marian_model(vocab_size=len(original))
    marian.save_pretrained(folder)
    assert convert(folder, tmp_path / "converted") == 0
    printed = capsys.readouterr().out
    assert "8 of 8 translations are equal" in printed and "Tokenizer converted" in printed
    assert "target_tokenizer.json: ids of the given texts: 8 of 8 equal" in printed
    config = json.loads((tmp_path / "converted" / "config.json").read_text(encoding="utf-8"))
    assert (config["source_vocab_size"] is None) == is_complete

    (tmp_path / "in.en").write_text("".join(f"{line}\n" for line in lines[:6]), encoding="utf-8")
    words = ["--model", str(tmp_path / "converted"), "--input", str(tmp_path / "in.en")]
    assert main(["translate", *words, "--output", str(tmp_path / "out")]) == 0
    expected = [
        original.decode(marian.generate(**original(line, return_tensors="pt"))[0], skip_special_tokens=True)
        for line in lines[:6]
    ]
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == expected


def test_a_checkpoint_is_written_for_ctranslate2(opus, tokenizer, tmp_path, capsys):
    """Also one with two vocabularies; of 8 bits, the agreement is printed and need not hold."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    assert convert(opus, tmp_path / "ours") == 0
    assert json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf-8"))["source_vocab_size"] is not None
    capsys.readouterr()
    assert convert(tmp_path / "ours", tmp_path / "engine", "--to", "ctranslate2") == 0
    assert "log probabilities differ by at most" in (printed := capsys.readouterr().out)
    assert "8 of 8 translations are equal" in printed
    assert ctranslate2.Translator(str(tmp_path / "engine")).compute_type == "float32"
    assert convert(tmp_path / "ours", tmp_path / "small", "--to", "ctranslate2", "--quantization", "int8") == 0
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("engine", "small")]
    assert sizes[1] < 0.8 * sizes[0]  # the positions stay in float32
    with pytest.raises(SystemExit, match="2"):
        convert(tmp_path / "ours", tmp_path / "other", "--to", "marian", "--quantization", "int8")
    assert "--quantization" in capsys.readouterr().err


def test_quantizations_are_ctranslate2s():
    assert set(QUANTIZATIONS) == set(pytest.importorskip("training.conversion.ctranslate2").QUANTIZATIONS)


def test_a_marian_checkpoint_becomes_an_ordinary_one(opus, tmp_path, capsys):
    output = tmp_path / "new" / "converted"
    assert convert(opus, output) == 0
    printed = capsys.readouterr().out
    assert str(output) in printed
    assert "8 of 8 translations are equal" in printed
    assert "checked on text" in printed
    model, report = AutoModelForSeq2SeqLM.from_pretrained(output, output_loading_info=True)
    assert not any(report.values())
    batch = padded_batch(59)
    assert relative_difference(MarianMTModel.from_pretrained(opus).eval(), model, batch, without=(59,)) < 1e-5
    assert AutoTokenizer.from_pretrained(output).get_vocab() == AutoTokenizer.from_pretrained(opus).get_vocab()
    assert {"checksums.json", "modeling_vaswani.py"} <= {path.name for path in output.iterdir()}
    record = json.loads((output / "converted_from.json").read_text())
    assert (record["source"], record["format"], record["equal"]) == (str(opus), "marian", 8)
    assert 0 < record["logits"] < 1e-5
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["converted"]


def test_fsmt_and_npz_are_recognised(tmp_path, capsys):
    fsmt_model().save_pretrained(tmp_path / "fsmt")
    (tmp_path / "npz").mkdir()
    write_folder(tmp_path / "npz")
    for name in ("fsmt", "npz"):
        assert convert(tmp_path / name, tmp_path / f"from-{name}") == 0
        assert "random tokens" in capsys.readouterr().out
        record = json.loads((tmp_path / f"from-{name}" / "converted_from.json").read_text())
        assert record["format"] == name
    assert json.loads((tmp_path / "from-npz" / "vocab.json").read_text())["null"] == 2
    assert (
        json.loads((tmp_path / "from-npz" / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "MarianTokenizer"
    )


def test_as_trained_changes_the_positions(opus, tmp_path):
    assert convert(opus, tmp_path / "output", "--as-trained") == 0
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "output").config
    assert (config.position_embedding, config.layer_norm_eps) == ("learned", 1e-6)
    assert json.loads((tmp_path / "output" / "converted_from.json").read_text())["as_trained"] is True


def test_a_checkpoint_becomes_a_marian_model_and_comes_back(tokenizer, tmp_path, capsys):
    model = new_model(tokenizer, d_k=8, d_v=8)
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    assert convert(tmp_path / "ours", tmp_path / "marian", "--to", "marian") == 0
    assert "8 of 8 translations are equal" in capsys.readouterr().out
    marian = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian")
    assert isinstance(marian, MarianMTModel)
    assert AutoTokenizer.from_pretrained(tmp_path / "marian").get_vocab() == tokenizer.get_vocab()
    batch = padded_batch(0)
    search = {"num_beams": 4, "length_penalty": 1.0}
    expected = translations(model, batch, **search, length_penalty_form="length", max_extra_tokens=None)
    assert translations(marian, batch, **search) == expected
    assert convert(tmp_path / "marian", tmp_path / "back") == 0
    back = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back")
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


def test_a_revision_of_a_hub_repository(hub, opus, tokenizer, tmp_path):
    api = HfApi()
    api.create_repo("alice/opus")
    first = api.upload_folder(repo_id="alice/opus", folder_path=opus).oid
    marian_model(source_vocab_size=len(tokenizer), activation_function="relu").save_pretrained(tmp_path / "second")
    api.upload_folder(repo_id="alice/opus", folder_path=tmp_path / "second")
    for revision, activation in ((first, "swish"), ("main", "relu")):
        assert convert("alice/opus", tmp_path / activation, "--revision", revision) == 0
        assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / activation).config.activation_function == activation
        assert json.loads((tmp_path / activation / "converted_from.json").read_text())["revision"] == revision


# Nothing half-written


def test_models_that_disagree_are_not_written(opus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(marian, "interleaved", lambda d_model: torch.arange(d_model))
    assert convert(opus, tmp_path / "output") == 1
    error = error_of(capsys)
    assert str(opus) in error
    assert "nothing was written: logits differ by at most" in error
    assert not list(tmp_path.iterdir())


def test_equal_logits_do_not_excuse_other_translations(opus, tmp_path, capsys, monkeypatch):
    found = agreement.Agreement(8, 1e-7, 7)
    monkeypatch.setattr("training.conversion.folders.compare", lambda *args: found)
    assert convert(opus, tmp_path / "output") == 1
    assert "7 of 8 translations" in error_of(capsys)


def test_an_output_that_exists_is_left_alone(opus, tmp_path, capsys):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine").write_text("mine")
    assert convert(opus, tmp_path / "output") == 1
    assert "expected a new name or an empty folder" in error_of(capsys)
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["mine"]


# Bad input


def test_a_tokenizer_that_does_not_fit_is_named(opus, tokenizer, tmp_path, capsys):
    marian_model().save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "output") == 1
    assert f"the tokenizer has {len(tokenizer)} tokens, the model 60" in error_of(capsys)


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_not_run(opus, tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((opus / "config.json").read_text())
    torch.save({"model.shared.weight": Bomb(tmp_path / "ran")}, source / "pytorch_model.bin")
    assert convert(source, tmp_path / "output") == 1
    assert str(source) in error_of(capsys)
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert convert(source, tmp_path / "output") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_model_of_another_kind_is_named(kind, tmp_path, capsys):
    small = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    if kind == "t5":
        model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_ff=8, num_layers=1))
    else:
        model = BartForConditionalGeneration(BartConfig(**small, encoder_attention_heads=2, decoder_attention_heads=2))
    model.save_pretrained(tmp_path / kind)
    assert convert(tmp_path / kind, tmp_path / "output") == 1
    assert f"model_type: expected one of marian, fsmt, npz, fairseq, vaswani, found '{kind}'" in error_of(capsys)
    assert convert(tmp_path / kind, tmp_path / "output", "--from", "marian") == 1
    assert f"model_type: expected one of marian, found '{kind}'" in error_of(capsys)


def test_what_is_missing_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert convert(tmp_path / "empty", tmp_path / "output") == 1
    assert "expected a config.json, a .npz of Marian or a .pt of fairseq, found none" in error_of(capsys)
    (tmp_path / "empty" / "model.pt").touch()
    assert convert(tmp_path / "empty", tmp_path / "output") == 1
    assert "model.pt" in error_of(capsys)
    assert convert(tmp_path / "empty" / "model.pt", tmp_path / "output") == 1
    assert "expected a folder or a Hub repository, found a file" in error_of(capsys)
    assert convert(tmp_path / "nowhere", tmp_path / "output") == 1
    assert "nowhere: no such folder" in error_of(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "marian"], "expected vaswani on one side"),
        (["--revision", "main"], "--revision"),
        (["--from", "pdf"], "--from"),
    ],
)
def test_impossible_arguments_end_with_status_2(opus, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        convert(opus, tmp_path / "output", *words)
    assert message in capsys.readouterr().err


def test_as_trained_is_for_models_of_marian(tmp_path, capsys):
    fsmt_model().save_pretrained(tmp_path / "fsmt")
    with pytest.raises(SystemExit, match="2"):
        convert(tmp_path / "fsmt", tmp_path / "output", "--as-trained")
    assert "--as-trained: expected a model of Marian, found fsmt" in capsys.readouterr().err


def test_help_and_mistakes_import_nothing_heavy():
    code = (
        "import contextlib, sys\nfrom training.cli import main\n"
        "for words in (['--help'], ['a'], ['a', 'b', '--from', 'pdf']):\n"
        "    with contextlib.suppress(SystemExit):\n        main(['convert', *words])\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
