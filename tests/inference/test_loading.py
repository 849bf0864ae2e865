"""Loading of checkpoints: foreign code does not run, and damage is an error of one line."""

import io
import json
import logging
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from hf_vaswani import VaswaniForConditionalGeneration
from support.fuzz_checkpoints import spoil
from support.models import tiny_config
from training.cli import main
from training.inference import demo_page
from training.inference.checkpoint_files import count_parameters
from training.paper import GENERATION
from training.trainer.arguments import VaswaniTrainingArguments
from training.trainer.trainer import VaswaniTrainer


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
    monkeypatch.setattr(demo_page, "import_gradio", lambda: gradio)
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
    """The one line on standard error, beside progress bars and the log of a training."""
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.strip()]
    lines = [line for line in lines if not re.search(r"%\||\[\d\d:\d\d", line)]
    if not any(line.startswith("hf-vaswani train: ") for line in lines):
        assert len(lines) == 1, lines
    assert lines[-1].startswith("hf-vaswani ")
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


def write_weights(folder: Path, weights: dict) -> None:
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "checksums.json").unlink()


def weights_of(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


FC1 = "model.decoder.layers.1.feed_forward.fc1.weight"
MISFITS = {
    "more layers": (lambda folder: edit(folder / "config.json", decoder_layers=3), "missing", "decoder.layers.2"),
    "fewer layers": (lambda folder: edit(folder / "config.json", decoder_layers=1), "unexpected", "decoder.layers.1"),
    "untied": (lambda folder: edit(folder / "config.json", tie_word_embeddings=False), "missing", "lm_head.weight"),
    "learned": (lambda folder: edit(folder / "config.json", position_embedding="learned"), "missing", "positions"),
    "wider": (lambda folder: edit(folder / "config.json", d_ff=32), "mismatched", "[24, 16], expected [32, 16]"),
    "one tensor": (lambda folder: write_weights(folder, {FC1: weights_of(folder)[FC1]}), "missing", "model.decoder"),
    "other names": (
        lambda folder: write_weights(folder, {f"x.{name}": tensor for name, tensor in weights_of(folder).items()}),
        "unexpected",
        "x.model.",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("command", ["translate", "average"])
def test_weights_that_do_not_fit_are_an_error(folder, run, capsys, command, misfit, tmp_path):
    spoil, kind, name = MISFITS[misfit]
    spoil(folder)
    assert run(command, folder) == 1
    message = one_line(capsys)
    assert str(folder) in message and kind in message and name in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", LOADING)
def test_every_command_refuses_weights_that_are_missing(folder, run, capsys, command, tmp_path):
    weights = weights_of(folder)
    del weights[FC1]
    write_weights(folder, weights)
    assert run(command, folder) == 1
    message = one_line(capsys)
    assert str(folder) in message and "missing" in message and FC1 in message


@pytest.mark.parametrize(
    ("command", "value"),
    [*((name, float("nan")) for name in LOADING), ("translate", float("inf")), ("translate", float("-inf"))],
)
def test_a_weight_that_is_no_number_is_named(folder, run, capsys, command, value):
    weights = weights_of(folder)
    weights[FC1][3, 5] = value
    write_weights(folder, weights)
    assert run(command, folder) == 1
    message = one_line(capsys)
    assert str(folder) in message and FC1 in message and "finite" in message


@pytest.mark.parametrize("command", LOADING)
def test_an_epsilon_that_is_no_number_is_named(folder, run, capsys, command):
    edit(folder / "config.json", layer_norm_eps=float("nan"))
    assert run(command, folder) == 1
    message = one_line(capsys)
    assert "config.json" in message and "layer_norm_eps" in message and "nan" in message


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_length_penalty_that_is_no_number_is_refused(folder, run, capsys, value):
    with pytest.raises(SystemExit) as stop:
        run("translate", folder, f"--length-penalty={value}")
    assert stop.value.code == 2
    assert f"--length-penalty: must be a finite number, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"), [("translate", ["--format", "jsonl"]), ("score-pairs", ["--tokens"]), ("score-pairs", [])]
)
def test_a_score_that_is_no_number_is_an_error(folder, run, capsys, command, words):
    """Finite weights overflow in float32, too."""
    weights = weights_of(folder)
    weights["model.shared.weight"] = weights["model.shared.weight"].sign() * 3e38
    write_weights(folder, weights)
    assert run(command, folder, *words) == 1
    out = capsys.readouterr()
    assert "nan" in out.err and "finite" in out.err
    assert "NaN" not in out.out


def test_a_changed_configuration_is_named(folder, run, capsys):
    """A changed dropout: no weight depends on it, so only the checksum can tell."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dropout": 0.7}))
    assert run("translate", folder) == 1
    message = one_line(capsys)
    assert f"{folder / 'config.json'}" in message and "SHA-256" in message and "checksums.json" in message
    checksums = json.loads((folder / "checksums.json").read_text())
    del checksums["config.json"]
    (folder / "checksums.json").write_text(json.dumps(checksums))
    assert run("translate", folder) == 0
    VaswaniForConditionalGeneration.from_pretrained(folder).save_pretrained(folder)
    assert json.loads((folder / "checksums.json").read_text())["config.json"]
    assert run("translate", folder) == 0


def test_a_search_changed_by_hand_is_used_with_a_warning(folder, run, caplog, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 2}))
    assert run("translate", folder) == 0
    assert f"{path} was changed after the model was saved" in caplog.text
    assert VaswaniForConditionalGeneration.from_pretrained(folder).generation_config.num_beams == 2


def test_an_earlier_versions_checksums_are_of_the_weights_alone(folder, run):
    checksums = json.loads((folder / "checksums.json").read_text())
    assert set(checksums) == {"model.safetensors", "config.json", "generation_config.json"}
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": checksums["model.safetensors"]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dropout": 0.7}))
    assert run("translate", folder) == 0


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        *((name, {"decoder_layers": 10**9}) for name in LOADING),
        ("translate", {"encoder_layers": 10**7, "d_ff": 1}),
        ("translate", {"vocab_size": 10**10}),
        ("translate", {"max_position_embeddings": 10**10, "position_embedding": "learned"}),
        ("translate", {"d_model": 10**8}),
    ],
)
def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(folder, run, capsys, command, fields):
    edit(folder / "config.json", **fields)
    assert run(command, folder) == 1
    message = one_line(capsys)
    assert "config.json" in message and " GB" in message and "parameters" in message
    assert all(f"{name} {value}" in message for name, value in fields.items() if name != "position_embedding")


def test_a_model_to_train_that_is_larger_than_the_memory_is_refused(folder, run, capsys):
    words = ["--model_overrides", '{"decoder_layers": 1000000000}']
    assert run("train --tokenizer_from", folder, *words) == 1
    assert "decoder_layers 1000000000" in one_line(capsys)


@pytest.mark.parametrize(
    "fields", [{"max_new_tokens": 10**12}, {"max_length": 10**12}, {"max_extra_tokens": 10**12}, {"num_beams": 10**9}]
)
def test_a_search_larger_than_the_memory_is_refused(folder, run, capsys, fields):
    (name, value), *_ = fields.items()
    edit(folder / "generation_config.json", **fields)
    assert run("translate", folder) == 1
    message = one_line(capsys)
    assert "generation_config.json" in message and f"{name} {value}" in message and " GB" in message


def test_more_beams_than_the_memory_holds_are_refused(folder, run, capsys):
    assert run("translate", folder, "--num-beams", "1000000000") == 1
    assert "num_beams 1000000000" in one_line(capsys)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": True},
        {"tie_word_embeddings": False},
        {"position_embedding": "learned", "max_position_embeddings": 50},
        {"encoder_layers": 3, "decoder_layers": 1, "d_k": 7},
    ],
)
def test_parameters_are_counted_without_building_the_model(fields):
    config = tiny_config(**fields)
    assert count_parameters(config) == VaswaniForConditionalGeneration(config).num_parameters()


def write(name: str, content: str | bytes):
    """Writes a file of a checkpoint, whose checksums are removed."""

    def spoil(folder: Path) -> None:
        (folder / "checksums.json").unlink()
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def fields(name: str, **values):
    return lambda folder: edit(folder / name, **values)


def replace_by(name: str):
    """Leaves a folder with one file."""

    def spoil(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text("{}")

    return spoil


def cut(name: str):
    return lambda folder: write(name, (folder / name).read_bytes()[:100])(folder)


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


BROKEN = {
    "no model": (replace_by("notes.txt"), ["no config.json"]),
    "an adapter": (replace_by("adapter_config.json"), ["adapter", "merged"]),
    "a file": (become_a_file, ["expected a checkpoint folder, found a file"]),
    "gone": (shutil.rmtree, ["no such folder"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "empty weights": (write("model.safetensors", ""), ["model.safetensors", "header"]),
    "cut weights": (cut("model.safetensors"), ["model.safetensors", "header"]),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["no tokenizer", "tokenizer.json"]),
    "cut tokenizer": (cut("tokenizer.json"), ["tokenizer.json", "expected JSON"]),
    "empty tokenizer": (write("tokenizer.json", "{}"), ["tokenizer.json", "model"]),
    "cut tokenizer_config": (cut("tokenizer_config.json"), ["tokenizer_config.json", "expected JSON"]),
    "no padding": (fields("tokenizer_config.json", pad_token=None), ["tokenizer_config.json", "padding token"]),
    "padding_side": (
        fields("tokenizer_config.json", padding_side="up"),
        ["tokenizer_config.json", "adding side", "up"],
    ),
    "empty config": (write("config.json", ""), ["config.json", "expected JSON"]),
    "deep config": (write("config.json", "[" * 100_000), ["config.json", "expected JSON", "recursion"]),
    "list for config": (write("config.json", "[3]"), ["config.json", "expected a JSON object, found [3]"]),
    "config in latin-1": (write("config.json", '{"é": 1}'.encode("latin-1")), ["config.json", "utf-8", "0xe9"]),
    "no model_type": (fields("config.json", model_type=None), ["config.json: model_type", "'vaswani'", "None"]),
    "model_type": (fields("config.json", model_type=["vaswani"]), ["config.json: model_type", "text", '["vaswani"]']),
    "auto_map": (fields("config.json", auto_map="x"), ["config.json: auto_map", "an object", '"x"']),
    "d_model": (fields("config.json", d_model="16"), ["config.json", "d_model", "int", "'16'"]),
    "d_ff null": (fields("config.json", d_ff=None), ["config.json", "d_ff", "int", "None"]),
    "dropout": (fields("config.json", dropout={}), ["config.json", "dropout", "{}"]),
    "no decoder": (fields("config.json", decoder_layers=0), ["config.json", "decoder_layers", "at least 1", "0"]),
    "activation": (fields("config.json", activation_function="reelu"), ["config.json: activation_function", "reelu"]),
    "pad_token_id": (fields("config.json", pad_token_id=999), ["config.json: pad_token_id", "400", "999"]),
    "dtype": (fields("config.json", dtype="float31"), ["config.json: dtype", "float32", "float31"]),
    **{
        f"num_beams {value!r}": (
            fields("generation_config.json", num_beams=value),
            ["generation_config.json: num_beams", "at least 1", json.dumps(value)],
        )
        for value in (0, -1, "four", [4], 4.5, True, {"beams": 4})
    },
    "length_penalty": (
        fields("generation_config.json", length_penalty=float("nan")),
        ["generation_config.json: length_penalty", "finite number", "nan"],
    ),
    "length_penalty_form": (
        fields("generation_config.json", length_penalty_form="gnnt"),
        ["generation_config.json: length_penalty_form", "length or gnmt", '"gnnt"'],
    ),
    "repetition_penalty": (
        fields("generation_config.json", repetition_penalty=2),
        ["generation_config.json: repetition_penalty", "as 1.0", "2"],
    ),
    "no start": (write("generation_config.json", "{}"), ["generation_config.json: decoder_start_token_id"]),
    "early_stopping": (
        fields("generation_config.json", early_stopping=[]),
        ["generation_config.json: early_stopping", "never", "[]"],
    ),
    "eos_token_id": (
        fields("generation_config.json", eos_token_id=[2, 400]),
        ["generation_config.json: eos_token_id", "400 tokens", "found 400"],
    ),
    "bad_words_ids": (
        fields("generation_config.json", bad_words_ids="x"),
        ["generation_config.json: bad_words_ids", "x"],
    ),
    "list for search": (write("generation_config.json", "[]"), ["generation_config.json", "object", "[]"]),
    "checksums": (lambda folder: (folder / "checksums.json").write_text("{"), ["checksums.json is damaged"]),
    "index": (write("model.safetensors.index.json", "[]"), ["model.safetensors.index.json", "not an index"]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_is_one_line(folder, run, capsys, broken):
    spoil, facts = BROKEN[broken]
    spoil(folder)
    assert run("translate", folder) == 1
    message = one_line(capsys)
    assert str(folder) in message
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize("broken", ["no model", "a file", "cut weights"])
@pytest.mark.parametrize("command", [name for name in LOADING if name != "translate"])
def test_every_command_says_what_is_broken_in_one_line(folder, run, capsys, command, broken):
    BROKEN[broken][0](folder)
    assert run(command, folder) == 1
    assert str(folder) in one_line(capsys)


@pytest.mark.parametrize("command", ["translate", "publish", "train --init_from"])
def test_folders_of_runs_name_the_checkpoints_below_them(original, run, capsys, tmp_path, command):
    for name in ("run/checkpoint-9", "run/checkpoint-10", "run/average", "run/checkpoint-8"):
        shutil.copytree(original, tmp_path / "demo" / name)
    (tmp_path / "demo" / "run" / "checkpoint.partial").mkdir()
    for folder in (tmp_path / "demo", tmp_path / "demo" / "run"):
        assert run(command, folder) == 1
        places = re.findall(r"\S*/(average|checkpoint-\d+)", one_line(capsys))
        assert places == ["average", "checkpoint-10", "checkpoint-9"]
    shutil.rmtree(tmp_path / "demo" / "run" / "average")
    (tmp_path / "demo" / "run" / "checkpoint-10" / "model.safetensors").unlink()
    assert run(command, tmp_path / "demo" / "run") == 1
    assert re.findall(r"checkpoint-\d+", one_line(capsys)) == ["checkpoint-9", "checkpoint-8"]


def test_a_file_of_a_checkpoint_names_its_folder(folder, run, capsys):
    assert run("translate", folder / "model.safetensors") == 1
    assert f"its folder is {folder}" in one_line(capsys)


def test_a_checkpoint_without_tokenizer_names_the_one_of_its_run(original, run, capsys, tmp_path):
    shutil.copytree(original, tmp_path / "run" / "checkpoint-9")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "run" / "checkpoint-9" / name).rename(tmp_path / "run" / name)
    assert run("translate", tmp_path / "run" / "checkpoint-9") == 1
    message = one_line(capsys)
    assert f"{tmp_path / 'run' / 'checkpoint-9'}: no tokenizer" in message and f"{tmp_path / 'run'} has one" in message


@pytest.mark.parametrize(("name", "value"), [("return_dict_in_generate", True), ("output_scores", True)])
def test_settings_of_what_a_search_returns_do_no_harm(folder, run, capsys, name, value):
    assert run("translate", folder) == 0
    expected = capsys.readouterr().out
    edit(folder / "generation_config.json", **{name: value})
    assert run("translate", folder) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.slow
def test_no_spoiled_checkpoint_gives_a_traceback(original, folder, run, capsys):
    """`main` raises what is no user's mistake, which fails here."""
    refused = 0
    for seed in range(500):
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        how = spoil(folder, seed)
        command = ("translate", "score-pairs")[seed % 2]
        status = run(command, folder, {"translate": "--format=jsonl", "score-pairs": "--tokens"}[command])
        out = capsys.readouterr()
        lines = [line for line in out.err.replace("\r", "\n").splitlines() if line.startswith("hf-vaswani ")]
        assert len(lines) == status, how
        assert "NaN" not in out.out and "Infinity" not in out.out, how
        refused += status
    assert refused > 300


def test_a_model_far_larger_than_its_weights_is_not_built(folder, run, capsys):
    """It would fit into the memory: it has 96 million parameters."""
    edit(folder / "config.json", encoder_layers=1, decoder_layers=1, d_ff=15 * 10**5)
    assert run("translate", folder) == 1
    message = one_line(capsys)
    assert str(folder) in message and "config.json" in message and "stored" in message


@pytest.mark.parametrize("change", ["missing", "unexpected", "wider"])
def test_a_run_does_not_resume_with_weights_that_do_not_fit(tokenizer, pairs, tmp_path, change):
    """The stock Trainer only warns of some."""
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(tiny_config(vocab_size=len(tokenizer)))
    arguments = VaswaniTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", eval_strategy="no")
    trainer = VaswaniTrainer(model, arguments, processing_class=tokenizer)
    model.save_pretrained(tmp_path / "saved")
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    weights = weights_of(tmp_path / "saved")
    if change == "unexpected":
        weights["x"] = weights[FC1].clone()
    else:
        fc1 = weights.pop(FC1)
        weights |= {FC1: fc1.repeat(2, 1)} if change == "wider" else {}
    write_weights(tmp_path / "saved", weights)
    with pytest.raises(ValueError, match="saved") as caught:
        trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert ("x" if change == "unexpected" else FC1) in str(caught.value)
