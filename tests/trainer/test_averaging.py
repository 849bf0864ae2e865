import json
import logging
import shutil
import signal

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback

from hf_vaswani import VaswaniForConditionalGeneration
from support.runs import make_trainer
from training.trainer.arguments import VaswaniTrainingArguments
from training.trainer.averaging import average, last_checkpoints, write_average
from training.trainer.checkpoints import complete_checkpoints
from training.trainer.signals import StopOnSignal
from training.trainer.trainer import VaswaniTrainer


class Weights(TrainerCallback):
    """Copies of the weights after each update."""

    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.after.append(copies(model))


class SignalAfter(TrainerCallback):
    """A signal that `stop` gets within an update."""

    def __init__(self, step: int | None, stop: StopOnSignal):
        self.step, self.stop = step, stop

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.stop.received = signal.SIGTERM


def copies(model) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def read(folder) -> dict[str, torch.Tensor]:
    return copies(VaswaniForConditionalGeneration.from_pretrained(folder))


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_mean(folder, parts: list) -> None:
    parts, mean = [read(part) for part in parts], read(folder)
    for name, weight in mean.items():
        expected = sum(part[name].double() for part in parts) / len(parts)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(parts[0][name], mean[name]) for name in mean)


def test_the_moving_average_is_that_of_a_hand_written_loop(tmp_path, tokenizer, pairs):
    trainer, weights = make_trainer(tmp_path, tokenizer, pairs, average="ema", ema_decay=0.75), Weights()
    trainer.add_callback(weights)
    trainer.train()
    output = write_average(trainer)
    expected = {}
    for step, after in enumerate(weights.after, start=1):
        for name, weight in after.items():
            expected[name] = 0.75 * expected[name] + 0.25 * weight.double() if step > 1 else weight.double()
        if step in (3, 6):
            for name, weight in read(tmp_path / f"checkpoint-{step}" / "ema").items():
                torch.testing.assert_close(weight.double(), expected[name], rtol=1e-6, atol=1e-7)
    assert_equal(read(output), read(tmp_path / "checkpoint-6" / "ema"))
    assert output == tmp_path / "average-ema"
    record = json.loads((output / "averaged_from.json").read_text())
    assert record == {"method": "exponential moving average of the weights", "decay": 0.75, "updates": 6}
    assert len(AutoTokenizer.from_pretrained(output)) == len(tokenizer)
    assert_equal(copies(trainer.model), weights.after[-1])


def test_a_resumed_run_keeps_the_same_moving_average(tmp_path, tokenizer, pairs):
    make_trainer(tmp_path / "whole", tokenizer, pairs, average="ema").train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    resumed = make_trainer(tmp_path / "resumed", tokenizer, pairs, average="ema")
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-3"))
    assert_equal(*(read(tmp_path / run / "checkpoint-6" / "ema") for run in ("whole", "resumed")))


def test_a_moving_average_does_not_begin_in_the_middle(tmp_path, tokenizer, pairs):
    make_trainer(tmp_path, tokenizer, pairs, max_steps=3).train()
    trainer = make_trainer(tmp_path, tokenizer, pairs, average="ema")
    with pytest.raises(FileNotFoundError, match="checkpoint-3/ema: no moving average"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_evaluation_scores_the_average_and_leaves_the_weights_to_the_bit(tmp_path, tokenizer, pairs):
    options = {"generation_num_beams": 1, "generation_max_length": 12}
    trainer = make_trainer(
        tmp_path, tokenizer, pairs, average="ema", eval_average=True, eval_strategy="steps", eval_steps=3, **options
    )
    trainer.train()
    before = copies(trainer.model)
    metrics = trainer.evaluate()
    assert_equal(copies(trainer.model), before)

    plain = make_trainer(tmp_path / "plain", tokenizer, pairs, trainer.model, **options)
    assert plain.evaluate()["eval_loss"] != metrics["eval_loss"]
    for name in ("checkpoint-3", "checkpoint-6"):
        model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / name / "ema")
        expected = make_trainer(tmp_path / "plain", tokenizer, pairs, model, **options).evaluate()
        step = int(name.removeprefix("checkpoint-"))
        found = next(e for e in trainer.state.log_history if "eval_loss" in e and e["step"] == step)
        assert (found["eval_loss"], found["eval_bleu"]) == (expected["eval_loss"], expected["eval_bleu"])

    undisturbed = make_trainer(tmp_path / "plain", tokenizer, pairs, eval_strategy="steps", eval_steps=3, **options)
    undisturbed.train()
    assert_equal(copies(undisturbed.model), before)


def test_the_mean_of_the_last_checkpoints_is_written_and_they_are_kept(tmp_path, tokenizer, pairs, caplog):
    options = {"average": "last", "average_count": 3, "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(tmp_path, tokenizer, pairs, **options)
    trainer.train()
    names = ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == names
    output = write_average(trainer)
    assert_mean(output, [tmp_path / name for name in names])
    record = json.loads((output / "averaged_from.json").read_text())
    assert record["checkpoints"] == [str(tmp_path / name) for name in names]

    trainer.args.average_count = 5  # of a run that ended with fewer; what is there already gives way
    with caplog.at_level(logging.WARNING):
        assert write_average(trainer) == output
    assert "expected 5 checkpoints, found 3" in caplog.text


def test_the_mean_of_the_best_checkpoints_is_written_and_they_are_kept(tmp_path, tokenizer, pairs, monkeypatch):
    scores = iter([30.0, 10.0, 40.0, 20.0, 25.0, 5.0])
    monkeypatch.setattr(VaswaniTrainer, "_bleu", lambda self, dataset, options: next(scores))
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "bleu"}
    options |= {"average": "best", "average_count": 2, "save_total_limit": 1}
    trainer = make_trainer(tmp_path, tokenizer, pairs, greater_is_better=True, **options)
    trainer.train()
    names = [folder.name for folder in complete_checkpoints(tmp_path)]
    assert names == ["checkpoint-1", "checkpoint-3", "checkpoint-6"]
    output = write_average(trainer)
    assert_mean(output, [tmp_path / "checkpoint-3", tmp_path / "checkpoint-1"])
    assert json.loads((output / "averaged_from.json").read_text())["eval_bleu"] == [40.0, 30.0]


def test_more_checkpoints_to_average_on_resume_take_no_older_best_one(tmp_path, tokenizer, pairs, monkeypatch, caplog):
    """Checkpoints 1 to 6 are deleted, except the best, the first."""
    scores = iter([50.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(VaswaniTrainer, "_bleu", lambda self, dataset, options: next(scores))
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "bleu"}
    options |= {"average": "last", "save_total_limit": 2}
    make_trainer(tmp_path, tokenizer, pairs, max_steps=8, average_count=2, **options).train()
    trainer = make_trainer(tmp_path, tokenizer, pairs, max_steps=9, average_count=4, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    names = [folder.name for folder in complete_checkpoints(tmp_path)]
    assert names == ["checkpoint-1", "checkpoint-7", "checkpoint-8", "checkpoint-9"]
    with caplog.at_level(logging.WARNING):
        output = write_average(trainer)
    assert "expected 4 checkpoints, found 3" in caplog.text
    record = json.loads((output / "averaged_from.json").read_text())
    assert record["checkpoints"] == [str(tmp_path / name) for name in names[1:]]
    assert_mean(output, [tmp_path / name for name in names[1:]])


def test_a_checkpoint_of_an_interruption_is_not_averaged(tmp_path, tokenizer, pairs):
    """A signal after update 3, where a checkpoint is due every second one, and after update 6, where one is due."""
    options = {"average": "last", "average_count": 3, "save_steps": 2}
    for step, resumed in ((3, None), (6, "checkpoint-3"), (None, "checkpoint-6")):
        trainer, stop = make_trainer(tmp_path, tokenizer, pairs, max_steps=8, **options), StopOnSignal()
        trainer.add_callback(SignalAfter(step, stop))
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=resumed and str(tmp_path / resumed))
        assert trainer.state.global_step == (step or 8)
    names = [folder.name for folder in complete_checkpoints(tmp_path)]
    assert names == [f"checkpoint-{step}" for step in (2, 3, 4, 6, 8)]
    record = json.loads((write_average(trainer) / "averaged_from.json").read_text())
    assert record["checkpoints"] == [str(tmp_path / f"checkpoint-{step}") for step in (4, 6, 8)]
    assert last_checkpoints(str(tmp_path), 4) == [tmp_path / f"checkpoint-{step}" for step in (2, 4, 6, 8)]


def test_evaluation_scores_the_mean_of_the_last_checkpoints(tmp_path, tokenizer, pairs):
    """That of the weights of updates 1 to 3, and of 2 to 4; it changes neither weights nor what is learned."""
    evaluation = {"generation_num_beams": 1, "generation_max_length": 12}
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 4, **evaluation}
    average_last = {"average": "last", "average_count": 3, "eval_average": True}
    trainer = make_trainer(tmp_path, tokenizer, pairs, **average_last, **options)
    trainer.train()
    found = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    for step, parts in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [2, 3, 4])):
        average([tmp_path / f"checkpoint-{part}" for part in parts], str(tmp_path / f"mean-{step}"))
        model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / f"mean-{step}")
        expected = make_trainer(tmp_path / "plain", tokenizer, pairs, model, **evaluation).evaluate()
        assert found[step] == expected["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == found[4]

    undisturbed = make_trainer(tmp_path / "plain", tokenizer, pairs, **options)
    undisturbed.train()
    assert_equal(copies(undisturbed.model), copies(trainer.model))
    assert undisturbed.evaluate()["eval_loss"] != found[4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "lats"}, "average must be last, best or ema, got 'lats'"),
        ({"average_count": 0}, "average_count must be positive, got 0"),
        ({"average": "ema", "ema_decay": 1.0}, r"ema_decay must be in \[0, 1\), got 1.0"),
        ({"average": "best", "eval_average": True}, "eval_average needs average=ema or last, got average=best"),
        ({"average": "best", "metric_for_best_model": None}, "average=best needs evaluation while training"),
        ({"average": "best", "eval_strategy": "no"}, "average=best needs evaluation while training"),
        ({"average": "best", "save_strategy": "epoch"}, "save_strategy is epoch, eval_strategy is steps"),
        ({"average": "last", "save_strategy": "no"}, "average=last needs checkpoints, but save_strategy is no"),
        (
            {"average": "ema", "eval_average": True, "load_best_model_at_end": True},
            "eval_average with load_best_model_at_end",
        ),
    ],
)
def test_an_average_that_cannot_be_is_an_error(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        VaswaniTrainingArguments(output_dir=str(tmp_path), **options)
