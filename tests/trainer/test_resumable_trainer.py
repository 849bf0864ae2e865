import errno
import json
import logging
import math
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_vaswani import VaswaniForConditionalGeneration
from support.files import contents
from support.hub_client import ALICE
from support.runs import SMALL, make_trainer
from training.cli import main
from training.demo_data import write_demo_data
from training.trainer.checkpoints import (
    PARTIAL,
    PROGRESS_NAME,
    clear_partial,
    complete_checkpoints,
    put_in_place,
    rotate,
)


class After(TrainerCallback):
    """Does something to the model after an update."""

    def __init__(self, step: int, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            self.action(model)


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def spoil(model) -> None:
    with torch.no_grad():
        model.model.decoder.layers[0].feed_forward.fc1.weight[0] = math.nan


def fill_the_disk(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.save", full)


def forbid_large_files(monkeypatch) -> None:
    """The system itself refuses what a library writes, which says so in its own way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))


def fail_as_tokenizers_do(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)


@pytest.fixture
def file_limit():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("cause", [fill_the_disk, forbid_large_files, fail_as_tokenizers_do])
def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    tmp_path, tokenizer, pairs, monkeypatch, cause, file_limit
):
    trainer = make_trainer(tmp_path, tokenizer, pairs, save_total_limit=1)
    trainer.add_callback(After(5, lambda model: cause(monkeypatch)))
    with pytest.raises(
        OSError, match=r"checkpoint-6 could not be written after update 6, with [\d,]+ bytes "
    ) as error:
        trainer.train()
    assert str(error.value).startswith(f"{tmp_path}: ")
    assert "No space left" in str(error.value) or "File too large" in str(error.value)
    assert str(error.value).endswith(f"The last good checkpoint is {tmp_path}/checkpoint-3.")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_final_model_that_cannot_be_written_leaves_the_earlier_one(tmp_path, tokenizer, pairs, monkeypatch):
    trainer = make_trainer(tmp_path, tokenizer, pairs, max_steps=3)
    trainer.train()
    trainer.save_run()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "trainer_state.json",
        "checksums.json",
    } <= before.keys()
    VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    with torch.no_grad():
        trainer.model.model.shared.weight.zero_()
    fill_the_disk(monkeypatch)
    with pytest.raises(OSError, match=r"the final model could not be written.*No space left.*checkpoint-3"):
        trainer.save_run()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("logging_steps", [1, 10])
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_update(tmp_path, tokenizer, pairs, logging_steps):
    """When it is logged, or at the latest before the next checkpoint."""
    trainer = make_trainer(tmp_path, tokenizer, pairs, logging_steps=logging_steps)
    trainer.add_callback(After(4, spoil))
    with pytest.raises(ValueError, match=f"The loss of update 5 is nan.*good checkpoint is {tmp_path}/checkpoint-3"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history)


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, tokenizer, pairs):
    """Where the loss, which is that before the update, does not show it yet."""
    trainer = make_trainer(tmp_path, tokenizer, pairs)
    trainer.add_callback(After(3, spoil))
    message = r"After update 3, weights are not finite: .*decoder.layers.0.*There is no earlier checkpoint"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_had_taken_all_steps_takes_none_when_it_is_resumed(tmp_path, tokenizer, pairs):
    for steps in (3, 5):  # in the middle of an epoch, and at its end
        pairs = pairs if steps == 3 else pairs[:60]
        run = tmp_path / str(steps)
        whole = make_trainer(run, tokenizer, pairs, max_steps=steps, logging_steps=2)
        end = whole.train()
        resumed = make_trainer(run, tokenizer, pairs, max_steps=steps, logging_steps=2)
        again = resumed.train(resume_from_checkpoint=str(run / f"checkpoint-{steps}"))
        assert again.global_step == steps
        assert again.training_loss == end.training_loss == resumed.state.log_history[-1]["train_loss"]
        for one, other in zip(whole.model.parameters(), resumed.model.parameters()):
            assert torch.equal(one, other)
    assert whole.state.epoch == 1.0


def test_the_mean_loss_is_that_of_all_updates(tmp_path, tokenizer, pairs):
    trainer = make_trainer(tmp_path, tokenizer, pairs)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    resumed = make_trainer(tmp_path, tokenizer, pairs)
    output = resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert output.training_loss == pytest.approx(sum(losses) / 6, rel=1e-6)


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_logged_loss_is_the_stock_trainers_to_the_bit(tmp_path, tokenizer, pairs, monkeypatch, spoilt):
    """The Trainer passes its own sums to `log`; with its filter of NaN, too."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 8, "logging_steps": 3, "save_strategy": "no"}
    trainer = make_trainer(tmp_path, tokenizer, pairs, logging_nan_inf_filter=spoilt, **options)
    if spoilt:
        trainer.add_callback(After(4, spoil))
    original, stock = trainer.log, []

    def log(logs, *args):
        stock.extend((name, logs[name]) for name in ("loss", "train_loss") if name in logs)
        original(logs, *args)

    monkeypatch.setattr(trainer, "log", log)
    trainer.train()
    logged = [(name, entry[name]) for entry in trainer.state.log_history for name in entry if name in dict(stock)]
    assert [name for name, _ in stock] == ["loss", "loss", "train_loss"]
    assert logged == stock
    assert all(0 < loss < math.inf for _, loss in logged)


def test_what_several_processes_had_not_logged_goes_on_in_one(tmp_path, tokenizer, pairs):
    """The log is the mean over processes, so what goes on is their mean."""
    make_trainer(tmp_path, tokenizer, pairs, max_steps=3, logging_steps=10).train()
    path = tmp_path / "checkpoint-3" / PROGRESS_NAME
    saved = json.loads(path.read_text())
    mine = saved["processes"][0]["loss"]
    saved["processes"] = [{**saved["processes"][0], "loss": mine + 1}, {**saved["processes"][0], "loss": mine + 3}]
    path.write_text(json.dumps(saved))
    entries = {}
    for name, change in (("two", 2.0), ("one", 0.0)):
        trainer = make_trainer(tmp_path, tokenizer, pairs, logging_steps=5)
        if not change:
            path.write_text(json.dumps({**saved, "processes": [{**saved["processes"][0], "loss": mine}]}))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        entries[name] = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entries["two"]["step"] == entries["one"]["step"] == 5
    assert entries["two"]["loss"] - entries["one"]["loss"] == pytest.approx(2 / 5, rel=1e-5)
    assert entries["two"]["padding_share"] == entries["one"]["padding_share"]


def test_the_best_checkpoint_is_found_where_the_run_has_moved_to(tmp_path, tokenizer, pairs, monkeypatch):
    scores = iter([30.0, 20.0, 10.0, 5.0])
    monkeypatch.setattr("training.trainer.trainer.VaswaniTrainer._bleu", lambda self, dataset, options: next(scores))
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "eval_bleu"}
    options |= {"save_total_limit": 2}
    make_trainer(tmp_path / "here", tokenizer, pairs, max_steps=2, **options).train()
    shutil.move(tmp_path / "here", tmp_path / "there")
    trainer = make_trainer(tmp_path / "there", tokenizer, pairs, max_steps=4, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "there" / "checkpoint-2"))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "there" / "checkpoint-1")
    assert [folder.name for folder in complete_checkpoints(tmp_path / "there")] == ["checkpoint-1", "checkpoint-4"]


def checkpoints(run, *steps: int) -> None:
    for step in steps:
        (run / f"checkpoint-{step}").mkdir(parents=True)
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"step": step}))


@pytest.mark.parametrize(
    ("limit", "keep", "regular", "left"),
    [
        (None, {10}, [2, 4, 8, 10], [2, 4, 8, 10]),
        (3, {10}, [2, 4, 8, 10], [4, 8, 10]),
        (1, {10}, [2, 4, 8, 10], [10]),
        (2, {2, 10}, [2, 4, 8, 10], [2, 10]),
        (1, {2, 4, 10}, [2, 4, 8, 10], [2, 4, 10]),
        (3, {10}, [2, 4, 10], [2, 4, 10]),  # an interruption wrote 8
        (2, {10}, [2, 4, 10], [4, 10]),
        (4, {10}, [2, 4, 10], [2, 4, 8, 10]),
    ],
)
def test_rotation_deletes_what_interruptions_wrote_then_the_oldest(tmp_path, limit, keep, regular, left):
    checkpoints(tmp_path, 10, 2, 8, 4)
    rotate(tmp_path, limit, {tmp_path / f"checkpoint-{step}" for step in keep}, regular)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{step}" for step in left)


def test_a_checkpoint_takes_the_place_of_one_that_was_not_complete(tmp_path):
    checkpoints(tmp_path / PARTIAL, 4)
    (tmp_path / "checkpoint-4").mkdir()
    put_in_place(tmp_path / PARTIAL / "checkpoint-4", tmp_path / "checkpoint-4")
    assert content(tmp_path / "checkpoint-4") == {"trainer_state.json": b'{"step": 4}'}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_what_was_to_be_replaced_is_put_back_and_the_rest_cleared(tmp_path):
    checkpoints(tmp_path, 2)
    checkpoints(tmp_path / PARTIAL, 4)
    checkpoints(tmp_path / PARTIAL / "replaced", 4)
    checkpoints(tmp_path / PARTIAL / "removed", 1)
    clear_partial(tmp_path)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert not (tmp_path / PARTIAL).exists()


MODEL_PATTERNS = ("*.safetensors", "*_vaswani.py", "config.json", "*_config.json", "tokenizer.json", "checksums.json")


def test_a_checkpoint_is_pushed_when_it_is_complete(hub, tmp_path, tokenizer, pairs):
    """The files that make the model, in its own folder and in the repository's: the last checkpoint's."""
    options = {"push_to_hub": True, "hub_model_id": "alice/safe", "hub_strategy": "all_checkpoints"}
    trainer = make_trainer(tmp_path / "run", tokenizer, pairs, hub_always_push=True, save_total_limit=2, **options)
    trainer.train()
    files = contents(hub.repositories["alice/safe"].at("main"))
    assert not [name for name in files if "partial" in name]
    for name, prefix in (("checkpoint-3", "checkpoint-3/"), ("checkpoint-6", "checkpoint-6/"), ("checkpoint-6", "")):
        pushed = {path.removeprefix(prefix) for path in files if path.startswith(prefix)}
        model = {
            path.name
            for path in (tmp_path / "run" / name).iterdir()
            if any(path.match(pattern) for pattern in MODEL_PATTERNS)
        }
        assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_vaswani.py"} <= model <= pushed
        for path in model:
            assert files[f"{prefix}{path}"] == (tmp_path / "run" / name / path).read_bytes()


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_token_is_written_nowhere_and_what_is_pushed_tells_nothing_of_the_machine(
    hub, tmp_path, strategy, caplog, capfd
):
    """Neither pickles nor absolute paths are pushed, whatever the strategy."""
    data = write_demo_data(str(tmp_path / "data"), train=60, val=5, test=5)
    files = ["--train_files", *map(str, data["train"]), "--eval_files", *map(str, data["val"])]
    push = ["--push_to_hub", "true", "--hub_token", ALICE, "--hub_strategy", strategy, "--hub_always_push", "true"]
    name, run = f"alice/token-{strategy}", tmp_path / "run"
    more = ["--hub_model_id", name, "--max_steps", "4", "--average", "last", "--average_count", "2"]
    with caplog.at_level(logging.INFO):
        assert main(["train", *files, "--output_dir", str(run), *SMALL, *push, *more]) == 0
        assert (
            main(["train", *files, "--output_dir", str(run), *SMALL, *push, *more, "--max_steps", "6", "--resume"])
            == 0
        )

    written = [path for path in run.rglob("*") if path.is_file()]
    assert {"training_args.bin", "run.json", "trainer_state.json", "README.md"} <= {path.name for path in written}
    assert [path for path in written if "tfevents" in path.name]
    assert [path for path in written if ALICE.encode() in path.read_bytes()] == []
    assert ALICE not in caplog.text + "".join(capfd.readouterr())
    assert torch.load(run / "training_args.bin", weights_only=False).hub_token is None

    repository = hub.repositories[name]
    pushed = {
        f"{id}/{path}": content for id in repository.commits for path, content in contents(repository.at(id)).items()
    }
    assert {"model.safetensors", "README.md", "tokenizer.json"} <= {Path(path).name for path in pushed}
    places = [str(tmp_path), str(Path.cwd()), str(Path.home()), tempfile.gettempdir(), ALICE]
    for path, content in pushed.items():
        assert not content.startswith((b"\x80", b"PK")), path  # pickles, and PyTorch's, which are zip files
        assert [place for place in places if place.encode() in content] == [], path
    folders = {path.split("/")[1] for path in pushed if path.count("/") > 1}
    steps = {f"checkpoint-{step}" for step in (2, 4, 6)}
    assert folders == {"checkpoint": {"last-checkpoint"}, "all_checkpoints": steps}[strategy]
