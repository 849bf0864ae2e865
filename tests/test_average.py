import json

import pytest
import torch
from conftest import tiny_config

from hf_vaswani import VaswaniForConditionalGeneration
from training.average import average
from training.cli import main


@pytest.fixture
def run(tmp_path, tokenizer):
    """A run's folder with checkpoints 80, 90 and 100, and an incomplete 110."""
    for seed, step in enumerate((80, 90, 100, 110)):
        torch.manual_seed(seed)
        folder = tmp_path / f"checkpoint-{step}"
        VaswaniForConditionalGeneration(tiny_config()).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if step != 110:
            (folder / "trainer_state.json").write_text("{}")
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
    assert main(["average", "--run", str(run), "--last", "4", *output]) == 1
    assert "asked for the last 4 checkpoints, found 3" in capsys.readouterr().err

    VaswaniForConditionalGeneration(tiny_config(d_ff=32)).save_pretrained(run / "other")
    names = [str(run / "checkpoint-80"), str(run / "other")]
    assert main(["average", "--checkpoints", *names, *output]) == 1
    assert "other differs from" in (message := capsys.readouterr().err)
    assert "in d_ff" in message
    assert not (run / "mean").exists()

    (run / "mean").mkdir()
    assert main(["average", "--run", str(run), "--last", "2", *output]) == 1
    assert "is there already" in capsys.readouterr().err


def test_a_best_checkpoint_from_long_ago_is_not_one_of_the_last(run, capsys):
    """The Trainer keeps it when it deletes its neighbours."""
    (run / "checkpoint-80").rename(run / "checkpoint-20")
    assert main(["average", "--run", str(run), "--last", "3", "--output", str(run / "mean")]) == 1
    assert "checkpoint-20 is not one of the last 3 that were written" in capsys.readouterr().err
    assert main(["average", "--run", str(run), "--last", "2", "--output", f"{run}/mean/"]) == 0


def test_an_adapter_is_no_model_to_average(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter, not a model's weights"):
        average([tmp_path], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
