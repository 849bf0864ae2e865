"""Whatever is read as a checkpoint: foreign code does not run, and what is broken is one line."""

import io
import json
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from conftest import tiny_config
from transformers import GenerationConfig

from hf_vaswani import VaswaniForConditionalGeneration
from training import demo
from training.cli import main
from training.paper import GENERATION


@pytest.fixture(scope="module")
def original(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(tiny_config(vocab_size=len(tokenizer)))
    model.generation_config = GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **GENERATION
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command on a checkpoint, with answers of "y" on standard input; gives the status."""
    (tmp_path / "en").write_text("the man sleeps\nthe child sees a book\n", encoding="utf-8")
    (tmp_path / "de").write_text("der Mann schläft\ndas Kind sieht ein Buch\n", encoding="utf-8")
    gradio = MagicMock()
    gradio.__version__ = "6.0"
    monkeypatch.setattr(demo, "import_gradio", lambda: gradio)
    texts = {"en": str(tmp_path / "en"), "de": str(tmp_path / "de"), "out": str(tmp_path / "out")}

    def run(command: str, model: Path, *more: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 20)))
        words = [word.format(model=model, **texts) for word in COMMANDS[command].split()]
        return main([*words, *more])

    return run


COMMANDS = {
    "translate": "translate --model {model} --input {en}",
    "translate-stdin": "translate --model {model}",
    "score": "score --model {model} --sources {en} --references {de}",
    "score-pairs": "score-pairs --model {model} --sources {en} --translations {de}",
    "align": "align --model {model} --sources {en} --translations {de}",
    "attention": "attention --model {model} --source man --output {out}.html",
    "average": "average --checkpoints {model} {model} --output {out}",
    "publish": "publish --checkpoint {model} --card-only {out}",
    "demo": "demo --model {model}",
    "train --init_from": "train --init_from {model} --train_files {en} {de} --output_dir {out} --max_steps 1 "
    "--report_to none --source_tokens_per_update 50 --target_tokens_per_update 50",
    "train --tokenizer_from": "train --tokenizer_from {model} --train_files {en} {de} --output_dir {out} "
    "--max_steps 1 --report_to none --source_tokens_per_update 50 --target_tokens_per_update 50 "
    '--model_overrides {{"d_model":16,"d_ff":16,"num_heads":2,"encoder_layers":1,"decoder_layers":1}}',
}
OURS_ONLY = {"average", "train --init_from"}
LOADING = [name for name in COMMANDS if name != "train --tokenizer_from"]


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    (path.parent / "checksums.json").unlink(missing_ok=True)


def one_line(capsys) -> str:
    """The one line on standard error, without progress bars."""
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "hf-vaswani " in line]
    assert len(lines) == 1, lines
    return lines[0]


CODE = """
from pathlib import Path
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

Path({proof!r}).write_text("ran")

class Config(BartConfig):
    model_type = "foreign"

class Model(BartForConditionalGeneration):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


def plant(folder: Path, what: str) -> Path:
    """Puts code into a checkpoint that writes a file, whose path is returned."""
    proof = folder.parent / "proof"
    (folder / "evil.py").write_text(CODE.format(proof=str(proof)))
    if what == "model":
        auto_map = {"AutoConfig": "evil.Config", "AutoModelForSeq2SeqLM": "evil.Model"}
        edit(folder / "config.json", model_type="foreign", auto_map=auto_map)
    elif what == "tokenizer":
        auto_map = {"AutoTokenizer": [None, "evil.Tokenizer"]}
        edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map)
    elif what == "search":
        (folder / "custom_generate").mkdir()
        (folder / "evil.py").rename(folder / "custom_generate" / "generate.py")
    elif what == "carried":
        for name in ("modeling_vaswani.py", "configuration_vaswani.py"):
            (folder / name).write_text(CODE.format(proof=str(proof)))
    return proof


@pytest.mark.parametrize(
    ("command", "what"), [*((name, "model") for name in LOADING), *((name, "tokenizer") for name in COMMANDS)]
)
def test_foreign_code_is_refused_and_nothing_is_asked(folder, run, capsys, command, what):
    proof = plant(folder, what)
    assert run(command, folder) == 1
    message = one_line(capsys)
    if what == "model" and command in OURS_ONLY:
        assert "config.json: model_type: expected 'vaswani', found 'foreign'" in message
    else:
        assert str(folder) in message and "--trust-remote-code" in message
    assert not proof.exists()
    assert sys.stdin.readline() == "y\n"  # the first line: none was read


@pytest.mark.parametrize("what", ["search", "carried"])
@pytest.mark.parametrize("command", ["translate", "score-pairs", "average"])
def test_code_beside_one_of_our_models_does_not_run(folder, run, command, what):
    proof = plant(folder, what)
    assert run(command, folder) == 0
    assert not proof.exists()


def test_carried_code_does_not_run_with_the_flag_either(folder, run):
    """The classes of `hf_vaswani` are those that it stands for."""
    proof = plant(folder, "carried")
    assert run("score-pairs", folder, "--trust-remote-code") == 0
    assert not proof.exists()


@pytest.mark.parametrize("command", ["score-pairs", "average", "train --tokenizer_from"])
def test_the_flag_runs_foreign_code(folder, run, command):
    proof = plant(folder, "tokenizer")
    assert run(command, folder, "--trust-remote-code") == 0
    assert proof.read_text() == "ran"


def test_a_kernel_of_the_hub_is_foreign_code(folder, run, capsys):
    edit(folder / "config.json", attn_implementation="somebody/kernel")
    assert run("translate", folder) == 1
    message = one_line(capsys)
    assert "attn_implementation" in message and "somebody/kernel" in message and "--trust-remote-code" in message
