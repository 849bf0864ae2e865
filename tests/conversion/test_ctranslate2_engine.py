"""`hf-vaswani translate --engine ctranslate2` gives what the default engine gives."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.models import noisy_translator, tiny_model
from training.cli import main
from training.inference.loading import load_checkpoint


pytest.importorskip("ctranslate2")

from training.conversion import ctranslate2_engine  # after importorskip


LENGTH_FORM = {"length_penalty_form": "length", "length_penalty": 1.0}


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return save(folder, noisy_translator(tokenizer, max_extra_tokens=8, num_beams=4), tokenizer)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(ctranslate2_engine, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def command(checkpoint, pairs, tmp_path):
    """Run `hf-vaswani translate` on a few lines and return its output; `None` if it failed."""
    source, output = tmp_path / "in.en", tmp_path / "out.de"
    source.write_text("".join(f"{english}\n" for english, _ in pairs[:9]) + f"\n{pairs[9][0]}\n", encoding="utf-8")

    def run(*words, model=checkpoint):
        line = ["translate", "--model", str(model), "--input", str(source), "--output", str(output)]
        return None if main([*line, *words]) else output.read_text(encoding="utf-8")

    return run


ENGINE = ("--engine", "ctranslate2")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--num-beams", "1"],
        ["--num-beams", "2", "--length-penalty", "2"],
        ["--window", "4", "--batch-tokens", "30"],
        ["--max-source-tokens", "12"],  # splits lines
        ["--dtype", "float32"],
    ],
    ids=" ".join,
)
def test_texts_are_those_of_the_default_engine(command, words):
    expected = command(*words)
    assert len(set(expected.splitlines())) > 5
    assert command(*ENGINE, *words) == expected


def test_torch_keeps_its_threads(command):
    """CTranslate2 sets the number for both: batches were translated one after the other."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        command(*ENGINE, "--num-beams", "1", "--max-extra-tokens", "1")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("words", [["--n-best", "4"], ["--num-beams", "1"]], ids=" ".join)
def test_scores_and_log_probabilities_are_those_of_the_default_engine(command, words):
    lists = [
        [json.loads(line)["translations"] for line in command(*engine, "--format", "jsonl", *words).splitlines()]
        for engine in ((), ENGINE)
    ]
    assert [len(line) for line in lists[1]] == [len(line) for line in lists[0]]
    compared = 0
    for expected, found in zip(*([row for line in lines for row in line] for lines in lists)):
        assert found["text"] == expected["text"]
        assert found["score"] == pytest.approx(expected["score"], abs=2e-3)
        assert [text for text, _ in found["tokens"]] == [text for text, _ in expected["tokens"]]
        assert [value for _, value in found["tokens"]] == pytest.approx(
            [value for _, value in expected["tokens"]], abs=2e-3
        )
        compared += 1
    assert compared >= 10


def test_prefixes_begin_the_translations_and_do_not_count_in_the_score(command, tmp_path):
    (tmp_path / "prefix").write_text("Der Hund\n\nEin\n" + "\n" * 8)
    words = ("--target-prefix", str(tmp_path / "prefix"), "--n-best", "2")
    expected, found = ([line.split(" ||| ") for line in command(*e, *words).splitlines()] for e in ((), ENGINE))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [float(row[2]) for row in found] == pytest.approx([float(row[2]) for row in expected], abs=2e-3)
    assert found[0][1].startswith("Der Hund")


def test_limits_follow_max_length_and_max_new_tokens(command, tokenizer, tmp_path):
    for name, value in (("max_length", 7), ("max_new_tokens", 5)):
        model = noisy_translator(tokenizer, **{name: value})
        folder = save(tmp_path / name, model, tokenizer)
        assert command(*ENGINE, model=folder) == command(model=folder)


def test_a_translation_may_end_at_once(command, tokenizer, tmp_path):
    model = noisy_translator(tokenizer, max_extra_tokens=8)
    biased = tiny_model(vocab_size=len(tokenizer), output_bias=True)
    biased.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        biased.lm_head.bias.fill_(0)[model.config.eos_token_id] = 100
    biased.generation_config = model.generation_config
    assert command(*ENGINE, model=save(tmp_path / "biased", biased, tokenizer)) == "\n" * 11


@pytest.mark.slow
def test_processes_share_the_work_and_one_of_them_converts(checkpoint, command, tmp_path):
    expected = command()
    code = "import sys; from training.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, "translate", "--model", str(checkpoint), "--input", str(tmp_path / "in.en")]
    line += ["--output", str(tmp_path / "shared"), "--processes", "2", *ENGINE]
    subprocess.run(line, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "shared").read_text(encoding="utf-8") == expected


def test_a_run_resumes_with_the_same_engine_only(command, monkeypatch, capsys):
    expected = command(*ENGINE, "--window", "3")
    original, calls = ctranslate2_engine.CTranslate2Search.translate, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("stopped")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ctranslate2_engine.CTranslate2Search, "translate", failing)
        assert command(*ENGINE, "--window", "3") is None
    assert command("--window", "3", "--resume") is None
    assert "engine ('ctranslate2', now None)" in capsys.readouterr().err
    assert command(*ENGINE, "--window", "3", "--resume") == expected


# The cache


def test_a_model_is_converted_once_by_content_and_type(checkpoint, tokenizer, cache, tmp_path, monkeypatch):
    model, _ = load_checkpoint(str(checkpoint), device=torch.device("cpu"))
    written, write = [], ctranslate2_engine.write
    monkeypatch.setattr(ctranslate2_engine, "write", lambda *args: (written.append(str(args[2])), write(*args)))
    (cache / "0.partial").mkdir(parents=True)  # of a process that was killed

    def convert(folder, quantization="float32"):
        return ctranslate2_engine.converted(str(folder), model, tokenizer, quantization)

    with ThreadPoolExecutor(3) as executor:
        [folder] = set(executor.map(convert, [checkpoint] * 3))
    assert written == [str(folder)] and not (cache / "0.partial").exists()
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert convert(tmp_path / "copy") == folder
    assert convert(checkpoint, "int8") != folder
    save(tmp_path / "other", tiny_model(vocab_size=len(tokenizer)), tokenizer)
    assert convert(tmp_path / "other") not in (folder, convert(checkpoint, "int8"))
    assert len(written) == 3


def test_a_damaged_entry_is_named(command, cache, capsys):
    command(*ENGINE)
    [file] = cache.glob("*/model.bin")
    file.write_bytes(file.read_bytes()[:1000])
    assert command(*ENGINE) is None
    assert f"{file.parent}: CTranslate2: " in capsys.readouterr().err


def test_int8_translates(command, cache):
    lines = command(*ENGINE, "--dtype", "int8").splitlines()
    assert len(lines) == 11 and len(set(lines)) > 5
    assert len(list(cache.glob("*/model.bin"))) == 1


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample"], "--sample needs --engine torch, got ctranslate2"),
        (["--model", "a", "b"], "an ensemble needs --engine torch, got ctranslate2 and 2 models"),
    ],
)
def test_what_this_engine_cannot_do_is_refused(command, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        command(*ENGINE, *words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: expected no such setting, found 3"),
        ({"repetition_penalty": 1.5}, "repetition_penalty: expected no such setting, found 1.5"),
        ({"early_stopping": "never", **LENGTH_FORM}, "early_stopping: expected true or false, found 'never'"),
        ({"max_extra_tokens": None}, "expected max_extra_tokens, max_length or max_new_tokens, found none"),
        ({"max_extra_tokens": 4000}, "--max-source-tokens 1024: translations of up to 5024 tokens"),
    ],
)
def test_settings_that_this_engine_cannot_follow_are_named(command, tokenizer, tmp_path, capsys, settings, message):
    folder = save(tmp_path / "model", noisy_translator(tokenizer, **settings), tokenizer)
    assert command(*ENGINE, model=folder) is None
    assert message in capsys.readouterr().err


def test_a_type_that_the_processor_lacks_is_named(command, monkeypatch, capsys):
    monkeypatch.setattr(ctranslate2_engine.ctranslate2, "get_supported_compute_types", lambda _: {"float32", "int8"})
    assert command(*ENGINE, "--dtype", "float16") is None
    assert "--dtype float16: CTranslate2 does not compute in float16 on this cpu, but in float32, int8" in (
        capsys.readouterr().err
    )


def test_without_ctranslate2_the_extra_is_named(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    for name in [name for name in sys.modules if name.startswith("training.conversion.ctranslate2")]:
        monkeypatch.delitem(sys.modules, name)
    assert command(*ENGINE) is None
    error = capsys.readouterr().err
    assert "pip install 'hf-vaswani[ctranslate2]'" in error and "Traceback" not in error
