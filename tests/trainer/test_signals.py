import json
import logging
import multiprocessing
import os
import signal
import time

import pytest
from transformers import AutoModelForSeq2SeqLM

from support.runs import launch_two, train_argv
from training.cli import main
from training.trainer import signals
from training.trainer.checkpoints import complete_checkpoints
from training.trainer.trainer import VaswaniTrainer


def losses(run) -> list[float]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]


def signal_within_batch(monkeypatch, batch: int, number: int) -> None:
    original, batches = VaswaniTrainer.compute_loss, []

    def compute_loss(self, *args, **kwargs):
        batches.append(1)
        if len(batches) == batch:
            os.kill(os.getpid(), number)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(VaswaniTrainer, "compute_loss", compute_loss)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    assert main(train_argv(data, run, "--max_steps", "6")) == 0
    return run


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_ends_the_update_writes_a_checkpoint_and_loses_nothing(
    tmp_path, data, whole, number, status, monkeypatch, caplog
):
    """Stopped in the first of the two batches of the third update, which has no regular checkpoint."""
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as stop:
        signal_within_batch(patch, 5, number)
        main(train_argv(data, tmp_path, "--max_steps", "6"))
    assert stop.value.code == status
    assert f"{number.name}: stopped after update 3, with a checkpoint. --resume" in caplog.text
    assert signal.getsignal(number) == handler
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    assert not (tmp_path / "model.safetensors").exists()

    if number == signal.SIGTERM:
        assert main(train_argv(data, tmp_path, "--max_steps", "6", "--resume")) == 0
        assert losses(tmp_path) == losses(whole)
        assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_signal_while_a_checkpoint_is_written_needs_no_further_update(tmp_path, data, monkeypatch):
    original = VaswaniTrainer._add_to_checkpoint

    def signalled(self, folder):
        os.kill(os.getpid(), signal.SIGTERM)
        original(self, folder)

    monkeypatch.setattr(VaswaniTrainer, "_add_to_checkpoint", signalled)
    with pytest.raises(SystemExit) as stop:
        main(train_argv(data, tmp_path, "--max_steps", "6"))
    assert stop.value.code == 143
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_signal_before_an_evaluation_has_a_checkpoint_written_first(tmp_path, data, whole, monkeypatch):
    """A scheduler may not wait for the evaluation; if it does, the result is in the checkpoint."""
    original, there = VaswaniTrainer.get_eval_dataloader, []

    def get_eval_dataloader(self, *args, **kwargs):
        there.append([folder.name for folder in complete_checkpoints(tmp_path)])
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(VaswaniTrainer, "get_eval_dataloader", get_eval_dataloader)
        signal_within_batch(patch, 7, signal.SIGTERM)
        main(train_argv(data, tmp_path, "--max_steps", "6"))
    assert stop.value.code == 143
    assert there == [["checkpoint-2", "checkpoint-4"]]
    history = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [4]
    assert main(train_argv(data, tmp_path, "--max_steps", "6", "--resume")) == 0
    assert losses(tmp_path) == losses(whole)
    assert json.loads((tmp_path / "checkpoint-6" / "progress.json").read_text())["saved_steps"] == [2, 4, 6]


def test_where_only_the_best_is_saved_a_signal_still_gives_a_checkpoint(tmp_path, data, monkeypatch):
    best = ["--save_strategy", "best", "--metric_for_best_model", "eval_loss", "--greater_is_better", "true"]
    best += ["--eval_steps", "2"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        signal_within_batch(patch, 7, signal.SIGTERM)
        main(train_argv(data, tmp_path, "--max_steps", "6", *best))
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2  # the loss falls, and the greatest was asked for


def test_a_signal_in_the_last_update_does_not_keep_a_run_from_its_end(tmp_path, data, whole, monkeypatch):
    signal_within_batch(monkeypatch, 12, signal.SIGTERM)
    assert main(train_argv(data, tmp_path, "--max_steps", "6")) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_with_epochs_for_steps_a_stop_within_one_does_not_count_as_its_end(tmp_path, data, monkeypatch):
    """Otherwise the log would have the entries of an epoch's end twice."""
    epochs = [
        "--save_strategy",
        "epoch",
        "--eval_strategy",
        "epoch",
        "--num_train_epochs",
        "2",
        "--eval_bleu",
        "false",
    ]
    assert main(train_argv(data, tmp_path / "whole", *epochs)) == 0
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        signal_within_batch(patch, 5, signal.SIGTERM)
        main(train_argv(data, tmp_path / "stopped", *epochs))
    assert [folder.name for folder in complete_checkpoints(tmp_path / "stopped")] == ["checkpoint-3"]
    assert main(train_argv(data, tmp_path / "stopped", *epochs, "--resume")) == 0
    logs = []
    for run in ("whole", "stopped"):
        history = json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"]
        logs.append([(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in history])
    assert logs[0] == logs[1]
    assert len([entry for entry in logs[0] if entry[2] is not None]) == 2


@pytest.mark.parametrize(("same_signal_seconds", "ended_by"), [(0.0, signal.SIGTERM), (60.0, None)])
def test_a_second_signal_ends_the_process_at_once(monkeypatch, same_signal_seconds, ended_by):
    """Unless it is the first, which a launcher has handed on again."""
    monkeypatch.setattr(signals, "SAME_SIGNAL_SECONDS", same_signal_seconds)
    if not (child := os.fork()):
        with signals.StopOnSignal() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            os._exit(stop.received)
    _, status = os.waitpid(child, 0)
    if ended_by:
        assert os.WTERMSIG(status) == ended_by
    else:
        assert os.WEXITSTATUS(status) == signal.SIGINT


def test_the_processes_that_read_data_outlive_a_signal_to_all(tmp_path, data, monkeypatch):
    """A job scheduler signals every process; with a reader gone, the update could not be finished."""
    original, batches, signalled = VaswaniTrainer.get_batch_samples, [], []

    def get_batch_samples(self, *args):
        batches.append(1)
        if len(batches) == 3:
            for reader in multiprocessing.active_children():
                os.kill(reader.pid, signal.SIGTERM)
                signalled.append(reader)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(VaswaniTrainer, "get_batch_samples", get_batch_samples)
    with pytest.raises(SystemExit) as stop:
        main(train_argv(data, tmp_path, "--max_steps", "6", "--dataloader_num_workers", "1"))
    assert stop.value.code == 143
    assert len(signalled) == 1
    assert complete_checkpoints(tmp_path)[-1].name == "checkpoint-3"


ONE_OF_TWO_IS_SIGNALLED = """
import os, signal, sys
from training.train import main
from training.trainer.trainer import VaswaniTrainer

original, batches = VaswaniTrainer.compute_loss, []

def compute_loss(self, *args, **kwargs):
    batches.append(1)
    if len(batches) == 3 and self.args.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, *args, **kwargs)

VaswaniTrainer.compute_loss = compute_loss
try:
    main(sys.argv[2:])
except SystemExit as stop:
    open(f"{sys.argv[1]}-{os.environ['RANK']}", "w").write(str(stop.code))
"""


@pytest.mark.slow
def test_two_processes_stop_after_the_same_update_and_go_on(tmp_path, data, caplog):
    (tmp_path / "script.py").write_text(ONE_OF_TWO_IS_SIGNALLED)
    whole, stopped = ([*train_argv(data, tmp_path / run, "--max_steps", "5")[1:]] for run in ("whole", "stopped"))
    done = launch_two([str(tmp_path / "script.py"), str(tmp_path / "status"), *stopped])
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"status-{rank}").read_text() for rank in range(2)] == ["143", "143"]
    assert [folder.name for folder in complete_checkpoints(tmp_path / "stopped")] == ["checkpoint-2", "checkpoint-3"]
    files = {path.name for path in (tmp_path / "stopped" / "checkpoint-3").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "progress.json"} <= files
    assert sorted(path.name for path in (tmp_path / "stopped").glob("checkpoint*")) == ["checkpoint-2", "checkpoint-3"]
    for command in ([*stopped, "--resume"], whole):
        done = launch_two(["-m", "training.train", *command])
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    one, other = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / run).state_dict() for run in ("whole", "stopped"))
    assert [name for name in one if not one[name].equal(other[name])] == []

    with caplog.at_level(logging.INFO):  # one process accumulates what two had
        assert main(train_argv(data, tmp_path / "stopped", "--max_steps", "6", "--resume")) == 0
    assert "devices (2, now 1)" in caplog.text
