import json

import pytest
import torch

from hf_vaswani import VaswaniForConditionalGeneration
from support.models import tiny_config
from training.cli import main
from training.trainer.averaging import average, last_checkpoints


@pytest.fixture
def run(tmp_path, tokenizer):
    """A run's folder with checkpoints 80, 90 and 100, and an incomplete 110."""
    for seed, step in enumerate((80, 90, 100, 110)):
        torch.manual_seed(seed)
        folder = tmp_path / f"checkpoint-{step}"
        VaswaniForConditionalGeneration(tiny_config()).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if step != 110:
            (folder / "trainer_state.json").write_text('{"save_steps": 10, "max_steps": 200}')
    return tmp_path


def weights(folder) -> dict[str, torch.Tensor]:
    return VaswaniForConditionalGeneration.from_pretrained(folder).state_dict()


def test_the_last_checkpoints_by_step_are_averaged(run, tokenizer):
    assert main(["average", "--run", str(run), "--last", "2", "--output", str(run / "mean")]) == 0
    first, second, mean = (weights(run / name) for name in ("checkpoint-90", "checkpoint-100", "mean"))
    for name, weight in mean.items():
        torch.testing.assert_close(weight, (first[name] + second[name]) / 2)
    record = json.loads((run / "mean" / "averaged_from.json").read_text())
    assert [path.rsplit("/", 1)[1] for path in record["checkpoints"]] == ["checkpoint-90", "checkpoint-100"]
    files = {path.name for path in (run / "mean").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files
    assert not any("partial" in path.name for path in run.iterdir())


def test_folders_with_similar_names_stay(run):
    for name in ("mean.partial", "mean.earlier"):
        (run / name).mkdir()
        (run / name / "precious").write_text("precious")
    average([run / "checkpoint-80"], str(run / "mean"))
    average([run / "checkpoint-90"], str(run / "mean"), replace=True)
    for name, weight in weights(run / "mean").items():
        torch.testing.assert_close(weight, weights(run / "checkpoint-90")[name])
    assert sorted(path.name for path in run.glob("mean*")) == ["mean", "mean.earlier", "mean.partial"]
    assert all((run / name / "precious").is_file() for name in ("mean.partial", "mean.earlier"))


def test_named_checkpoints_are_averaged(run):
    names = [str(run / f"checkpoint-{step}") for step in (80, 90, 100)]
    assert main(["average", "--checkpoints", *names, "--output", str(run / "mean")]) == 0
    parts, mean = [weights(name) for name in names], weights(run / "mean")
    for name, weight in mean.items():
        torch.testing.assert_close(weight, sum(part[name] for part in parts) / 3)


def test_the_average_is_tied(run):
    main(["average", "--run", str(run), "--last", "3", "--output", str(run / "mean")])
    model = VaswaniForConditionalGeneration.from_pretrained(run / "mean")
    assert model.lm_head.weight.data_ptr() == model.model.shared.weight.data_ptr()


def test_what_cannot_be_averaged_is_named(run, capsys):
    output = ["--output", str(run / "mean")]
    assert main(["average", "--run", str(run), "--last", "11", *output]) == 1
    assert "expected 11 checkpoints, found 10" in capsys.readouterr().err
    assert main(["average", "--run", str(run), "--last", "5", *output]) == 1
    assert "of the last 5 checkpoints, these are missing: checkpoint-60, checkpoint-70" in capsys.readouterr().err

    VaswaniForConditionalGeneration(tiny_config(d_ff=32)).save_pretrained(run / "other")
    names = [str(run / "checkpoint-80"), str(run / "other")]
    assert main(["average", "--checkpoints", *names, *output]) == 1
    assert "other differs from" in (message := capsys.readouterr().err)
    assert "in d_ff" in message
    assert not (run / "mean").exists()

    (run / "mean").mkdir()
    assert main(["average", "--run", str(run), "--last", "2", *output]) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_best_checkpoint_from_long_ago_is_not_one_of_the_last(run, capsys):
    """The Trainer keeps it when it deletes its neighbours."""
    (run / "checkpoint-80").rename(run / "checkpoint-20")
    assert main(["average", "--run", str(run), "--last", "3", "--output", str(run / "mean")]) == 1
    assert "of the last 3 checkpoints, these are missing: checkpoint-80." in capsys.readouterr().err
    assert main(["average", "--run", str(run), "--last", "2", "--output", f"{run}/mean/"]) == 0


@pytest.mark.parametrize("noted", [True, False])
def test_a_checkpoint_of_an_interruption_is_not_one_of_the_last(run, noted):
    """The run recorded its regular checkpoints, here by minutes, or `save_steps` implies them."""
    steps = {True: (7, 81, 97, 113), False: (70, 80, 90, 95)}[noted]
    for old, new in zip((110, 100, 90, 80), steps[::-1]):
        (run / f"checkpoint-{old}").rename(run / f"{new}")
    for step in steps:
        folder = (run / str(step)).rename(run / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text('{"save_steps": 10, "max_steps": 200}')
        if noted:
            saved = [one for one in (7, 81, 97) if one <= step]
            (folder / "progress.json").write_text(json.dumps({"saved_steps": saved}))
    assert main(["average", "--run", str(run), "--last", "3", "--output", str(run / "mean")]) == 0
    record = json.loads((run / "mean" / "averaged_from.json").read_text())
    assert record["checkpoints"] == [str(run / f"checkpoint-{step}") for step in steps[:3]]


def test_the_checkpoint_of_the_last_update_is_one_of_the_last(run):
    """Also where `save_steps` does not divide the updates."""
    (run / "checkpoint-110").rename(run / "checkpoint-105")
    (run / "checkpoint-105" / "trainer_state.json").write_text('{"save_steps": 10, "max_steps": 105}')
    assert [folder.name for folder in last_checkpoints(str(run), 2)] == ["checkpoint-100", "checkpoint-105"]


def test_an_average_that_cannot_be_written_leaves_nothing(run, capsys, monkeypatch):
    def full(self, folder, **kwargs):
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    before = {path.name for path in run.iterdir()}
    assert main(["average", "--run", str(run), "--last", "2", "--output", str(run / "mean")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"hf-vaswani average: {run}: mean could not be written, with ")
    assert error.endswith(" bytes free there: No space left on device (os error 28).")
    assert {path.name for path in run.iterdir()} == before


def test_an_adapter_is_no_model_to_average(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter, not a model's weights"):
        average([tmp_path], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
