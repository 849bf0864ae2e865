import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import sacrebleu
import torch
from datasets import IterableDataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from support.models import tiny_config
from support.runs import SMALL, launch_two, train_argv, train_when_told
from support.warm import WARM
from training.cli import main
from training.data.encoding import FilteredStream
from training.hardware import hardware
from training.trainer.arguments import VaswaniTrainingArguments, parse_arguments
from training.trainer.checkpoints import TRAINING_CHECKSUMS_NAME, complete_checkpoints
from training.trainer.manifest import check_same_run, make_manifest
from training.trainer.run import train
from training.trainer.trainer import VaswaniTrainer


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert main(train_argv(data, output, "--max_steps", "4")) == 0
    return output


def test_a_run_leaves_checkpoints_logs_and_a_model_that_auto_classes_load(run):
    assert complete_checkpoints(run)[-1].name == "checkpoint-4"
    assert list(run.glob("**/events.out.tfevents*"))
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4]
    assert [
        set(entry) >= {"eval_loss", "eval_perplexity", "eval_bleu"} for entry in history if "eval_loss" in entry
    ] == [True]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert model.config.vocab_size == len(tokenizer) == 300
    search = model.generation_config
    assert (search.num_beams, search.length_penalty_form, search.length_penalty) == (4, "gnmt", 0.6)
    assert search.max_extra_tokens == 50
    assert model.generation_config.decoder_start_token_id == tokenizer.bos_token_id


def test_the_papers_rate_is_the_default(run):
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert rates[-1] == pytest.approx((16 * 4) ** -0.5)  # the peak, at the last warm-up step


def test_a_run_is_not_overwritten_and_can_be_resumed(run, data, capsys):
    assert main(train_argv(data, run, "--max_steps", "4")) == 1
    assert "already has checkpoint-4: pass --resume" in capsys.readouterr().err
    assert main(train_argv(data, run, "--max_steps", "6", "--resume")) == 0
    assert complete_checkpoints(run)[-1].name == "checkpoint-6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model_overrides", '{"d_model": 16, "num_heads": 4}'], "model.num_heads (2, now 4)"),
        (["--model_overrides", SMALL[1][:-1] + ', "dropout": 0.2}'], "model.dropout (0.1, now 0.2)"),
        (["--model_overrides", SMALL[1][:-1] + ', "label_smoothing": 0.0}'], "model.label_smoothing (0.1, now 0.0)"),
        (["--vocab_size", "400"], "vocab_size (300, now 400)"),
        (["--max_length", "60"], "max_length (256, now 60)"),
        (["--seed", "7"], "seed (42, now 7)"),
        (["--adam_beta2", "0.9"], "adam_beta2 (0.98, now 0.9)"),
        (["--learning_rate", "1e-2"], "learning_rate (0.125, now 0.01)"),
        (["--warmup_steps", "5"], "warmup_steps (4.0, now 5.0)"),
        (["--target_tokens_per_update", "900"], "target_tokens_per_update (1000, now 900)"),
        (["--tokens_per_device", "250"], "batches of an update (2, now 4)"),
        (["--average", "ema"], "ema_decay (None, now 0.999)"),
        (["--metric_for_best_model", "eval_loss"], "metric_for_best_model (eval_bleu, now eval_loss)"),
    ],
)
def test_a_run_that_has_changed_is_not_resumed(run, data, capsys, change, message, monkeypatch):
    monkeypatch.setattr(
        "training.trainer.trainer.VaswaniTrainer.train", lambda *args, **kwargs: pytest.fail("it trains")
    )
    assert main(train_argv(data, run, "--max_steps", "6", "--resume", *change)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"hf-vaswani train: --resume: this is not the run that wrote {run}/checkpoint-")
    assert message in error


def test_data_that_has_changed_is_not_resumed_from(run, data, tmp_path, capsys):
    """Also where only its content has, and in a letter."""
    source, target = (tmp_path / Path(name).name for name in data["train"])
    shutil.copy(data["train"][0], source)
    text = Path(data["train"][1]).read_bytes()
    target.write_bytes(text[:-3] + bytes([text[-3] ^ 1]) + text[-2:])
    command = train_argv(data, run, "--max_steps", "6", "--resume", "--train_files", str(source), str(target))
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"train_files[1] ({{'size': {len(text)}, 'sha256': '{hashlib.sha256(text).hexdigest()}'}}, now" in error
    assert "train_files[0]" not in error

    with target.open("a") as file:
        file.write("Noch ein Satz.\n")
    with source.open("a") as file:
        file.write("One more sentence.\n")
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "train_files[0] (" in error
    assert "pairs (200, now 201)" in error


def test_evaluation_data_that_have_changed_are_not_resumed_with(run, data, tmp_path, capsys):
    """Their scores would be compared with the best of the earlier."""
    changed = tmp_path / "val.de"
    changed.write_text(Path(data["val"][1]).read_text().upper())
    files = ["--eval_files", data["val"][0], str(changed)]
    assert main(train_argv(data, run, "--max_steps", "8", "--resume", *files)) == 1
    error = capsys.readouterr().err
    assert "eval_files[1] ({" in error
    assert "eval_files[0]" not in error


@pytest.mark.parametrize("change", [["--bleu_tokenize", "none"], ["--generation_num_beams", "3"]])
def test_a_run_is_not_resumed_with_another_way_of_scoring(run, data, capsys, change):
    assert main(train_argv(data, run, "--max_steps", "8", "--resume", *change)) == 1
    assert f"{change[0][2:]} (" in capsys.readouterr().err


def test_a_vocabulary_that_has_changed_is_not_resumed_with(run, data, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = complete_checkpoints(copy)[-1] / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].pop()
    (path.parent / TRAINING_CHECKSUMS_NAME).unlink()
    path.write_text(json.dumps(tokenizer))
    assert main(train_argv(data, copy, "--max_steps", "6", "--resume")) == 1
    assert "tokenizer (" in capsys.readouterr().err


def test_what_changes_nothing_that_is_learned_may_change_and_is_logged(run, data, tmp_path, caplog):
    """The run has moved, so have its data, under other names; more steps, saved and logged at others."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(run / "checkpoint-4", copy / "checkpoint-4")
    moved = [str(shutil.copy(name, tmp_path / f"moved.{i}")) for i, name in enumerate(data["train"])]
    more = ["--max_steps", "8", "--resume", "--save_steps", "3", "--eval_steps", "3", "--logging_steps", "2"]
    more += ["--gradient_accumulation_steps", "2", "--tokens_per_device", "600", "--train_files", *moved]
    with caplog.at_level(logging.INFO):
        assert main(train_argv(data, copy, *more)) == 0
    message = next(record.message for record in caplog.records if record.message.startswith("Allowed changes since"))
    assert message.startswith("Allowed changes since checkpoint-4: ")
    for change in ("max_steps (4, now 8)", "save_steps (2, now 3)", "tokens_per_device (500, now 600)", "moved.0"):
        assert change in message
    assert [folder.name for folder in complete_checkpoints(copy)] == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    history = json.loads((copy / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("optimizer.pt", "checkpoint-4 has no optimiser state (save_only_model)"),
        ("scheduler.pt", "checkpoint-4 has no optimiser state"),
    ],
)
def test_weights_alone_are_not_resumed_from(run, data, tmp_path, capsys, missing, message):
    shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / missing).unlink()
    (tmp_path / "checkpoint-4" / TRAINING_CHECKSUMS_NAME).unlink()
    assert main(train_argv(data, tmp_path, "--max_steps", "6", "--resume")) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("by", "other"), [("by", "without"), ("without", "with")])
def test_a_state_of_the_optimiser_that_would_not_be_read_is_named(run, data, tmp_path, capsys, monkeypatch, by, other):
    """DeepSpeed writes and reads its own; the Trainer would go on without what it cannot read."""
    copy = Path(shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4"))
    if by == "by":
        for name in ("optimizer.pt", "scheduler.pt", TRAINING_CHECKSUMS_NAME):
            (copy / name).unlink()
        (copy / "global_step4").mkdir()
    else:
        plugin = property(lambda self: SimpleNamespace(zero_stage=2), lambda *args: None)
        monkeypatch.setattr(VaswaniTrainingArguments, "deepspeed_plugin", plugin, raising=False)
    assert main(train_argv(data, tmp_path, "--max_steps", "6", "--resume")) == 1
    assert f"checkpoint-4 was written {by} DeepSpeed, but this run is {other} DeepSpeed" in capsys.readouterr().err


def test_a_run_at_work_is_left_alone_by_another_start(run, data, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoint.partial" / "checkpoint-8").mkdir(parents=True)
    assert main(train_argv(data, copy, "--max_steps", "8")) == 1
    assert (copy / "checkpoint.partial" / "checkpoint-8").exists()


def test_a_schedule_that_ends_with_the_run_cannot_be_extended(data, tmp_path, capsys):
    linear = ["--lr_scheduler_type", "linear", "--learning_rate", "0.01"]
    assert main(train_argv(data, tmp_path, "--max_steps", "2", *linear)) == 0
    assert main(train_argv(data, tmp_path, "--max_steps", "3", "--resume", *linear)) == 1
    assert "max_steps (2, now 3)" in capsys.readouterr().err


def test_without_a_record_the_model_alone_is_compared(run, data, tmp_path, capsys, caplog):
    copy = tmp_path / "run"
    shutil.copytree(run / "checkpoint-4", copy / "checkpoint-4")
    for name in ("run.json", TRAINING_CHECKSUMS_NAME):
        (copy / "checkpoint-4" / name).unlink()
    other = ["--resume", "--model_overrides", '{"d_model": 16, "num_heads": 4}']
    with caplog.at_level(logging.WARNING):
        assert main(train_argv(data, copy, "--max_steps", "5", *other)) == 1
    assert "has no run.json: only the model is compared" in caplog.text
    assert f"has no {TRAINING_CHECKSUMS_NAME}: only its weights are checked" in caplog.text
    assert "num_heads (2, now 4)" in capsys.readouterr().err
    assert main(train_argv(data, copy, "--max_steps", "5", "--resume")) == 0


def test_a_folder_that_cannot_be_written_is_an_error_before_training(data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(train_argv(data, tmp_path / "file" / "run", "--max_steps", "1")) == 1
    assert f"{tmp_path}/file/run" in capsys.readouterr().err


def test_an_output_dir_that_is_a_file_is_one_line_at_the_start(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    files = ["--train_files", str(tmp_path / "missing.en"), str(tmp_path / "missing.de")]
    assert main(["train", *files, "--output_dir", str(tmp_path / "run"), *SMALL, "--max_steps", "1"]) == 1
    error = capsys.readouterr().err
    assert f"output_dir {tmp_path}/run: " in error and "is not a folder" in error
    assert error.count("\n") == 1 and "Errno" not in error


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (["--model", "bse"], ["bse"]),
        (["--model_overrides", '{"d_modell": 1}'], ["d_modell"]),
        (["--model_overrides", '{"d_model": -1}'], ["d_model", "-1"]),
        (["--model_overrides", '{"position_embedding": "learned", "max_position_embeddings": 9}'], ["max_length is"]),
        (["--vocab_size", "100"], ["vocab_size", "259", "100"]),
        (["--tokenizer_from", "EMPTY"], ["EMPTY"]),
        (["--init_from", "NO TOKENIZER"], ["NO TOKENIZER", "tokenizer"]),
        (["--init_from", "NO TOKENIZER", "--extend_vocabulary", "9"], ["NO TOKENIZER", "tokenizer"]),
        (["--init_from", "WHOLE", "--vocab_size", "301"], ["vocab_size=301"]),
        (["--init_from", "WHOLE", "--lora_rank", "2", "--average", "last"], ["average=last", "lora_rank"]),
        (["--early_stopping_patience", "1", "--eval_strategy", "no"], ["early_stopping_patience=1"]),
    ],
)
def test_a_mistake_in_the_model_is_named_before_the_data_are_read(run, tmp_path, capsys, change, fields):
    """The data are a FIFO, which never ends, and a file that does not exist."""
    folders = {"EMPTY": tmp_path / "empty", "NO TOKENIZER": tmp_path / "no-tokenizer", "WHOLE": tmp_path / "whole"}
    folders["EMPTY"].mkdir()
    shutil.copytree(run / "checkpoint-4", folders["WHOLE"])
    shutil.copytree(run / "checkpoint-4", folders["NO TOKENIZER"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folders["NO TOKENIZER"] / name).unlink()
    os.mkfifo(tmp_path / "train.en")
    files = [str(tmp_path / "train.en"), str(tmp_path / "missing.de")]
    names = {name: str(folder) for name, folder in folders.items()}
    command = ["train", "--train_files", *files, "--eval_files", *files, "--output_dir", str(tmp_path / "run")]
    options = [] if "--init_from" in change else SMALL
    assert main([*command, *options, "--max_steps", "1", *(names.get(word, word) for word in change)]) == 1
    error = capsys.readouterr().err
    assert all(names.get(field, field) in error for field in fields)
    assert "missing.de" not in error and "FIFO" not in error and "a pipe" not in error


def test_a_folder_that_has_become_read_only_is_an_error_before_training(run, data, monkeypatch, capsys):
    mkdir = Path.mkdir

    def read_only(self, *args, **kwargs):
        if self.is_relative_to(run):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(VaswaniTrainer, "training_step", lambda *args: pytest.fail("it trains"))
    assert main(train_argv(data, run, "--max_steps", "8", "--resume")) == 1
    assert f"Read-only file system: '{run}" in capsys.readouterr().err


def test_a_data_file_that_vanishes_leaves_the_last_checkpoint(data, tmp_path, capsys, monkeypatch):
    """While it is read as a stream, pass after pass."""
    files = [str(shutil.copy(name, tmp_path)) for name in data["train"]]
    original = VaswaniTrainer._save_checkpoint

    def save_and_remove(self, *args):
        original(self, *args)
        Path(files[0]).unlink(missing_ok=True)

    monkeypatch.setattr(VaswaniTrainer, "_save_checkpoint", save_and_remove)
    stream = ["--train_files", *files, "--output_dir", str(tmp_path / "run"), "--streaming", "true"]
    assert main(["train", *stream, *SMALL, "--max_steps", "50"]) == 1
    assert files[0] in capsys.readouterr().err
    last = complete_checkpoints(tmp_path / "run")[-1]
    monkeypatch.undo()
    assert main(["train", *stream, *SMALL, "--max_steps", "50", "--resume"]) == 1
    assert f"{files[0]}: no such file" in capsys.readouterr().err
    shutil.copy(data["train"][0], files[0])
    step = int(last.name.removeprefix("checkpoint-"))
    assert main(["train", *stream, *SMALL, "--max_steps", str(step + 2), "--resume"]) == 0


def test_the_average_that_was_asked_for_is_written_at_the_end(data, tmp_path):
    assert main(train_argv(data, tmp_path, "--max_steps", "4", "--average", "last", "--average_count", "2")) == 0
    record = json.loads((tmp_path / "average-last" / "averaged_from.json").read_text())
    assert [Path(name).name for name in record["checkpoints"]] == ["checkpoint-2", "checkpoint-4"]
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "average-last")


def test_damaged_weights_are_not_resumed_from(run, data, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    weights = complete_checkpoints(copy)[-1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert main(train_argv(data, copy, "--max_steps", "9", "--resume")) == 1
    assert f"{weights} is damaged" in capsys.readouterr().err


def cut(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"is damaged: it has {size // 2:,} bytes of {size:,}."


def flip(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"is damaged: its SHA-256 is {hashlib.sha256(content).hexdigest()}, but training_checksums.json has "


def remove(path: Path) -> str:
    path.unlink()
    return "is missing."


@pytest.mark.parametrize("damage", [cut, flip, remove])
@pytest.mark.parametrize(
    "name",
    [
        *("optimizer.pt", "scheduler.pt", "rng_state.pth", "progress.json", "run.json"),
        *("tokenizer.json", "config.json", "model.safetensors", "checksums.json"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_damaged_or_missing_is_named(run, data, tmp_path, capsys, name, damage):
    """And what to do: without the last checkpoint, the run goes on from the one before."""
    for step in (2, 4):
        shutil.copytree(run / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    last = tmp_path / "checkpoint-4"
    message = damage(last / name)
    assert main(train_argv(data, tmp_path, "--max_steps", "5", "--resume")) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hf-vaswani train: {last / name} {message}")
    assert error.endswith(f" Remove {last} to resume from checkpoint-2.\n")


def test_a_damaged_checkpoint_that_is_removed_gives_way_to_the_one_before(run, data, tmp_path, capsys):
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    assert main(train_argv(data, tmp_path, "--max_steps", "3", "--resume")) == 0
    cut(tmp_path / "checkpoint-2" / "optimizer.pt")
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert main(train_argv(data, tmp_path, "--max_steps", "3", "--resume")) == 1
    assert capsys.readouterr().err.endswith(
        "no earlier checkpoint to resume from: start a new run in another folder.\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{cut", "run.json: not a JSON object"),
        ("run.json", '{"must_match": 3, "may_change": {}}', "'must_match' expected a dict, got int"),
        ("run.json", '{"must_match": {}}', "run.json: no field 'may_change'"),
        ("trainer_state.json", '{"global_step": "2"}', "'global_step' expected int, got str (value: '2')"),
        ("progress.json", '{"total_loss": 1.0, "last_logged": 2}', "progress.json: no field 'processes'"),
    ],
)
def test_a_run_with_a_broken_record_is_not_resumed(run, data, tmp_path, capsys, name, text, message):
    """One that is broken, not damaged: without the checksums, as of a checkpoint of the stock Trainer."""
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / TRAINING_CHECKSUMS_NAME).unlink()
    (tmp_path / "checkpoint-2" / name).write_text(text)
    assert main(train_argv(data, tmp_path, "--max_steps", "4", "--resume")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(tmp_path / "checkpoint-2" / name) in error and message in error


def test_a_tokenizer_that_cannot_be_written_leaves_nothing(data, tmp_path, capsys, monkeypatch):
    """The disk gets full in the middle of its file, of which tokenizers says so by a bare Exception."""

    def full(self, folder, **kwargs):
        Path(folder, "tokenizer.json").write_text("{cut o")
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    assert main(train_argv(data, tmp_path / "run", "--max_steps", "1")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    start, middle, end = (
        re.escape(f"hf-vaswani train: {tmp_path}/run: the tokenizer could not be written, with "),
        r"[\d,]+",
        re.escape(" bytes free there: No space left on device (os error 28)."),
    )
    assert re.fullmatch(start + middle + end, error)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_its_beginning(tmp_path, data, run, caplog):
    """So that a job that is started again and again may always say --resume."""
    with caplog.at_level(logging.WARNING):
        assert main(train_argv(data, tmp_path, "--max_steps", "2", "--resume")) == 0
    assert f"--resume: {tmp_path} has no checkpoint yet; the run starts from its beginning." in caplog.text
    assert complete_checkpoints(tmp_path)[-1].name == "checkpoint-2"


def test_a_run_that_is_not_there_is_not_resumed(tmp_path, data, capsys):
    assert main(train_argv(data, tmp_path / "misspelt", "--resume")) == 1
    assert f"no complete checkpoint in {tmp_path / 'misspelt'}" in capsys.readouterr().err


def test_resuming_needs_a_complete_checkpoint(tmp_path, data, capsys, caplog):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"cut off')
    (tmp_path / "checkpoint-7").mkdir()
    with caplog.at_level(logging.WARNING):
        assert main(train_argv(data, tmp_path, "--resume")) == 1
    assert "no complete checkpoint" in capsys.readouterr().err
    assert caplog.text.count("is incomplete") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--train_files", "nowhere.en", "nowhere.de"], "nowhere.en: no such file"),
        (["--max_length", "2"], "No pair is left: 0 of 200 pairs kept; dropped: 0 empty, 200 too long"),
        (["--model", "huge"], "Table 3 has no row 'huge'"),
        (["--model_overrides", '{"d_mdel": 3}'], "no field 'd_mdel'"),
        (["--model_overrides", '{"dropout": 3}'], "dropout must be in [0, 1), got 3"),
        (["--model_overrides", '{"source_vocab_size": 9}'], "model_overrides, source_vocab_size: "),
        (
            ["--model_overrides", "{position_embedding: learned, max_position_embeddings: 99}"],
            "max_length is 256, but the model has only 99 learned positions",
        ),
        (["--vocab_size", "10"], "vocab_size must be at least 259"),
        (["--tokens_per_device", "10"], "lower max_length, or raise the tokens"),
        (["--enable_jit_checkpoint", "true"], "enable_jit_checkpoint"),
    ],
)
def test_what_is_wrong_is_one_line_on_standard_error(tmp_path, data, capsys, change, message):
    assert main(train_argv(data, tmp_path, "--max_steps", "1", *change)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-vaswani train: ")
    assert message in error


def test_training_without_evaluation_data(tmp_path, data, capsys):
    files = ["--train_files", *data["train"], "--output_dir", str(tmp_path)]
    assert main(["train", *files, *SMALL, "--max_steps", "2", "--average", "best"]) == 1
    assert "average=best: there is no evaluation data" in capsys.readouterr().err
    assert main(["train", *files, *SMALL, "--max_steps", "2"]) == 0
    assert complete_checkpoints(tmp_path)[-1].name == "checkpoint-2"


def test_a_run_that_ends_within_a_pass_reports_what_its_stream_dropped(tmp_path, data, caplog):
    """One update of one window; of the 200 pairs, those that were read ahead are counted too."""
    stream = ["--streaming", "true", "--stream_window", "50", "--max_length", "60"]
    with caplog.at_level(logging.INFO):
        assert main(train_argv(data, tmp_path / "run", *stream, "--max_steps", "1")) == 0
    [message] = [record.message for record in caplog.records if " over the training data: " in record.message]
    found = re.fullmatch(
        r"Part of a pass over the training data: (\d+) of (\d+) pairs kept; "
        r"dropped: 0 empty, (\d+) too long, 0 by length ratio\.",
        message,
    )
    kept, read, too_long = map(int, found.groups())
    assert 50 <= read < 200 and kept >= 50 and too_long > 0
    assert kept + too_long == read


def test_training_from_a_stream(tmp_path, data, caplog):
    """Twenty updates are several passes; pairs that are too long are counted in each."""
    stream = ["--streaming", "true", "--stream_window", "90", "--max_length", "60"]
    with caplog.at_level(logging.INFO):
        assert main(train_argv(data, tmp_path / "whole", *stream, "--max_steps", "20")) == 0
    passes = [record.message for record in caplog.records if record.message.startswith("A pass over")]
    assert passes
    assert len(set(passes)) == 1
    assert passes[0].startswith("A pass over the training data: ")
    assert "of 200 pairs kept" in passes[0]

    shutil.copytree(tmp_path / "whole" / "checkpoint-10", tmp_path / "resumed" / "checkpoint-10")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert main(train_argv(data, tmp_path / "resumed", *stream, "--max_steps", "20", "--resume")) == 0
    resumed = [record.message for record in caplog.records if record.message.startswith("A pass over")]
    assert set(resumed) == set(passes)
    assert len(resumed) < len(passes)  # those before were not read again
    losses = []
    for run in ("whole", "resumed"):
        history = json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--max_steps", "-1", "--num_train_epochs", "1"], "num_train_epochs: the length of a stream is unknown"),
        (["--max_length", "501"], "max_length is 501, but a batch has only 500 tokens per side"),
        (["--stream_window", "0"], "stream_window must be positive, got 0"),
    ],
)
def test_what_is_wrong_with_a_stream_is_known_before_it_is_read(tmp_path, data, capsys, monkeypatch, change, message):
    monkeypatch.setattr("training.trainer.run.load_datasets", lambda *args: pytest.fail("it reads"))
    assert main(train_argv(data, tmp_path, "--streaming", "true", "--max_steps", "9", *change)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shards", [4, 3])
def test_a_stream_is_not_resumed_on_devices_that_would_make_other_batches(tmp_path, tokenizer, monkeypatch, shards):
    """Two devices read two of four files each. Three files are read by both, and one device makes the same batches."""
    stream = IterableDataset.from_generator(lambda shard: iter(()), gen_kwargs={"shard": list(range(shards))})
    records = []
    for devices in (2, 1):
        monkeypatch.setattr(VaswaniTrainingArguments, "world_size", property(lambda self, devices=devices: devices))
        words = ["--streaming", "true", "--output_dir", str(tmp_path), "--tokens_per_device", "3125"]
        arguments = parse_arguments([*words, "--learning_rate", "1"])
        records.append(make_manifest(*arguments, tiny_config(), tokenizer, FilteredStream(stream)))
    (tmp_path / "run.json").write_text(json.dumps(records[0]))
    if shards == 3:
        check_same_run(records[1], str(tmp_path))
    else:
        with pytest.raises(ValueError, match=r": devices that read files of their own \(2, now 1\)\."):
            check_same_run(records[1], str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="the cores of a process are known on Linux alone")
def test_a_run_records_the_processor_and_the_cores_it_may_use():
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        found = hardware(torch.device("cpu"))
    finally:
        os.sched_setaffinity(0, mine)
    assert (found["device"], found["cores"]) == ("cpu", 1)
    rows = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    names = [value.strip() for key, value in rows if key.strip() == "model name"]
    assert found["name"].strip() == (names[0] if names else platform.processor() or platform.machine())


def test_a_run_records_the_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H{200 + device.index}")
    found = hardware(torch.device("cuda", 1))
    assert (found["device"], found["name"]) == ("cuda", "NVIDIA H201")


@pytest.mark.slow  # test_distributed.py compares two processes with one
def test_two_processes_train_like_one_that_accumulates(tmp_path, data):
    """Under `accelerate launch`; the batches of an update are the same, so are losses and weights."""
    overrides = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    more = ["--max_steps", "4", "--model_overrides", json.dumps(overrides)]
    assert main(train_argv(data, tmp_path / "one", *more)) == 0
    done = launch_two(["-m", "training.train", *train_argv(data, tmp_path / "two", *more)[1:]])
    assert done.returncode == 0, done.stderr
    assert "in 1 batch on 2 devices" in done.stderr

    one, two = (
        json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"] for run in ("one", "two")
    )
    for name in ("loss", "eval_loss"):
        expected = [entry[name] for entry in one if name in entry]
        assert expected
        assert [entry[name] for entry in two if name in entry] == pytest.approx(expected, rel=1e-5)
    weights = [AutoModelForSeq2SeqLM.from_pretrained(tmp_path / run).state_dict() for run in ("one", "two")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5)


BLEU_ON_TWO_PROCESSES = """
import sys
import training.trainer.trainer
from support.runs import make_trainer
from training.demo_data import generate_pairs
from training.data.tokenizer import train_tokenizer

pairs = generate_pairs(300, seed=1)
nearly = {source: " ".join(target.split()[:-1]) for source, target in pairs}
training.trainer.trainer.translate = lambda model, tokenizer, texts, *args, **kwargs: [nearly[text] for text in texts]
tokenizer = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400, show_progress=False)
trainer = make_trainer(sys.argv[1], tokenizer, pairs)
everything = trainer.eval_dataset
scores = [trainer.evaluate(everything.select(range(int(count))))["eval_bleu"] for count in sys.argv[2:]]
with open(f"{sys.argv[1]}-{trainer.args.process_index}", "w") as file:
    print(*scores, file=file)
"""


@pytest.mark.slow
def test_two_processes_score_all_sentences_in_order(tmp_path, pairs):
    """Also a number that two does not divide, and fewer sentences than processes."""
    counts = [19, 1]
    (tmp_path / "script.py").write_text(BLEU_ON_TWO_PROCESSES)
    done = launch_two([str(tmp_path / "script.py"), str(tmp_path / "run"), *map(str, counts)])
    assert done.returncode == 0, done.stderr
    expected = []
    for count in counts:
        targets = [target for _, target in pairs[:count]]
        expected.append(sacrebleu.corpus_bleu([" ".join(target.split()[:-1]) for target in targets], [targets]).score)
    for rank in range(2):
        scores = [float(score) for score in (tmp_path / f"run-{rank}").read_text().split()]
        assert scores == pytest.approx(expected)
    assert min(expected) > 20


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_training_from_a_data_set_in_the_layout_of_the_hub(tmp_path, pairs, streaming, caplog):
    """With a pair without a source, which is dropped and counted."""
    rows = [{"translation": {"en": source, "de": target}} for source, target in [*pairs, ("", "leer")]]
    for split, part in (("train", rows), ("validation", rows[-5:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / f"{split}.parquet")
    hub = ["--dataset_name", str(tmp_path), "--streaming", streaming, "--output_dir", str(tmp_path / "run")]
    with caplog.at_level(logging.INFO):
        assert main(["train", *hub, *SMALL, "--max_steps", "12"]) == 0
    assert "Evaluation data: 4 of 5 pairs kept; dropped: 1 empty" in caplog.text
    assert "300 of 301 pairs kept; dropped: 1 empty" in caplog.text
    assert complete_checkpoints(tmp_path / "run")[-1].name == "checkpoint-12"


def test_a_data_set_of_the_hub_that_has_changed_is_not_resumed_with(tmp_path, pairs, capsys):
    """Though every pair is as long as before: two have changed places."""
    folder = tmp_path / "data"
    folder.mkdir()

    def write(rows):
        table = pyarrow.Table.from_pylist([{"translation": {"en": source, "de": target}} for source, target in rows])
        for split in ("train", "validation"):
            pyarrow.parquet.write_table(table, folder / f"{split}.parquet")

    write(pairs)
    command = ["train", "--dataset_name", str(folder), "--output_dir", str(tmp_path / "run"), *SMALL]
    assert main([*command, "--max_steps", "2"]) == 0
    assert main([*command, "--max_steps", "4", "--resume"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    counts = [[len(tokenizer(text)["input_ids"]) for text in pair] for pair in pairs]
    first, second = next(
        (i, j) for j in range(len(pairs)) for i in range(j) if counts[i] == counts[j] and pairs[i] != pairs[j]
    )
    changed = list(pairs)
    changed[first], changed[second] = pairs[second], pairs[first]
    write(changed)
    assert main([*command, "--max_steps", "6", "--resume"]) == 1
    error = capsys.readouterr().err
    assert "tokens of the pairs (" in error
    assert "lengths of the pairs" not in error


def test_an_error_in_a_stream_names_the_line(tmp_path, data, capsys):
    broken = tmp_path / "broken.tsv"
    broken.write_text("one\teins\n" * 150 + "two\n")
    files = ["--train_files", str(broken), "--output_dir", str(tmp_path / "run"), "--streaming", "true"]
    assert main(["train", *files, *SMALL, "--stream_window", "100", "--max_steps", "50"]) == 1
    assert "broken.tsv:151: expected 2 columns" in capsys.readouterr().err


@pytest.mark.parametrize("ended", [pytest.param("itself", marks=pytest.mark.slow), "killed"])
def test_a_second_run_keeps_off_the_folder_of_a_living_one(tmp_path, data, capsys, ended):
    """Another process trains there. When it has ended, in whatever way, the folder is free."""
    run = tmp_path / "run"
    at_work, go_on = WARM.Event(), WARM.Event()
    words = train_argv(data, run, "--max_steps", "4")
    process = WARM.Process(target=train_when_told, args=(words, at_work, go_on), daemon=True)
    process.start()
    try:
        assert at_work.wait(120)
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        for more in ([], ["--resume"]):
            assert main(train_argv(data, run, "--max_steps", "4", *more)) == 1
            error = capsys.readouterr().err
            assert str(run) in error and "another run is at work" in error
            assert f"process {process.pid} on {platform.node()}" in error and error.count("\n") == 1
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        if ended == "killed":
            process.kill()
        else:
            go_on.set()  # which would wait for a dead process
        process.join(120)
    finally:
        process.kill()
    assert process.exitcode == (0 if ended == "itself" else -9)
    assert main(train_argv(data, run, "--max_steps", "6", "--resume")) == 0
    assert complete_checkpoints(run)[-1].name == "checkpoint-6"


def test_only_the_first_process_locks_the_folder(tmp_path, monkeypatch):
    """The others would find it locked."""
    monkeypatch.setattr("training.trainer.run._train", lambda model, data, args: args.process_index)
    locked = []
    monkeypatch.setattr("training.trainer.run.lock_run", lambda run: locked.append(run) or contextlib.nullcontext())
    for rank in (0, 1):
        monkeypatch.setattr(VaswaniTrainingArguments, "process_index", rank)
        assert train(*parse_arguments(["--output_dir", str(tmp_path)])) == rank
    assert locked == [tmp_path]
