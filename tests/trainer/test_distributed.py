"""Any number of devices, the same training."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

import training.trainer.onednn
import training.trainer.run
from support.distributed_training import NARROWEST, RecordingTrainer
from support.paths import ROOT, SUPPORT
from training.cli import main
from training.demo_data import write_demo_data


UPDATES = 10
WARMUP = 4
PEAK = 1e-3
MODEL = {"d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
# Updates of four parts, in whatever way they are shared; ten updates are more than an epoch, whose last has three.
SMALL = [
    *("--model_overrides", json.dumps(MODEL), "--vocab_size", "300"),
    *("--learning_rate", str(PEAK), "--warmup_steps", str(WARMUP)),
    *("--source_tokens_per_update", "1000", "--target_tokens_per_update", "1000", "--tokens_per_device", "250"),
    *("--max_steps", str(UPDATES), "--save_steps", "5", "--logging_steps", "1", "--eval_steps", "5"),
    *("--generation_num_beams", "1", "--generation_max_length", "12", "--disable_tqdm", "true", "--report_to", "none"),
]
PARTS = 4
GROUPS = {  # in the names of weights
    "embedding": ["shared"],
    "encoder attention": ["encoder.layers", "_attn."],
    "encoder feed-forward": ["encoder.layers", "feed_forward."],
    "encoder norms": ["encoder.layers", "norm."],
    "decoder self-attention": ["decoder.layers", "self_attn."],
    "decoder cross-attention": ["decoder.layers", "encoder_attn."],
    "decoder feed-forward": ["decoder.layers", "feed_forward."],
    "decoder norms": ["decoder.layers", "norm."],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    files = write_demo_data(str(tmp_path_factory.mktemp("data")), train=120, val=7, test=4)
    return {split: [str(path) for path in paths] for split, paths in files.items()}


def words(data, run: Path, *more: str) -> list[str]:
    files = ["--train_files", *data["train"], "--eval_files", *data["val"]]
    return ["train", *files, "--output_dir", str(run), *SMALL, *more]


def launch(processes: int, folder: Path, jobs: list[dict]) -> str:
    """Does the jobs of distributed_training.py, under `accelerate launch`; what they wrote to stderr."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    command += ["--config_file", str(ROOT / "training" / "recipes" / "accelerate" / "fsdp2.yaml")]
    command += ["--main_process_port", "0", str(SUPPORT / "distributed_training.py"), str(folder / "jobs.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


class OneBatch:
    """An independent training: plain PyTorch, each update one batch of all its pairs, and no Trainer."""

    def __init__(self, trainer, weights: dict[str, torch.Tensor]):
        self.trainer, self.model = trainer, trainer.model
        self.model.load_state_dict(weights)
        self.model.train()

    def batches(self):
        sampler = self.trainer.token_budget_sampler()
        pairs = self.trainer.train_dataset
        for epoch in range(UPDATES):
            sampler.set_epoch(epoch)
            parts = list(sampler.parts())
            for first in range(0, len(parts), PARTS):
                rows = [int(row) for part in parts[first : first + PARTS] for row in part]
                yield self.trainer.data_collator([pairs[row] for row in rows])

    def train(self) -> tuple[list[float], list[dict]]:
        optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9)
        losses, updates = [], []
        for step, batch in zip(range(1, UPDATES + 1), self.batches()):
            logits = self.model(**batch).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            updates.append({name: weight.grad.clone() for name, weight in self.model.named_parameters()})
            optimizer.param_groups[0]["lr"] = PEAK * WARMUP**0.5 * min(step**-0.5, step * WARMUP**-1.5)
            optimizer.step()
        return losses, updates


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The run of one process, its losses and gradients, and the same of the independent training."""
    folder, trainers, starts = tmp_path_factory.mktemp("alone"), [], []

    class Kept(RecordingTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)
            starts.append({name: weight.clone() for name, weight in self.model.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.trainer.run, "VaswaniTrainer", Kept)
        patch.setattr(training.trainer.onednn, "NARROWEST", NARROWEST)
        assert main(words(data, folder / "run")) == 0
    losses, updates = OneBatch(trainers[0], starts[0]).train()
    return folder / "run", losses, updates


def history_of(run: Path) -> list[dict]:
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def losses_of(run: Path) -> list[float]:
    return [entry["loss"] for entry in history_of(run) if "loss" in entry]


def table(updates: list[dict], expected: list[dict]) -> dict[str, float]:
    """For each group of weights the largest relative difference of a gradient: |g - g'| / |g'|."""
    differences = {}
    for group, marks in GROUPS.items():
        names = [name for name in expected[0] if all(mark in name for mark in marks)]
        assert names
        differences[group] = max(
            float((one[name] - other[name]).norm() / other[name].norm())
            for one, other in zip(updates, expected)
            for name in names
        )
    return differences


def compare(runs: dict[str, Path], losses: list[float], updates: list[dict]) -> None:
    """Prints the table of differences, and asserts that there are none but by rounding."""
    columns = {}
    for name, run in runs.items():
        gradients = torch.load(run / "gradients.pt")
        assert len(gradients) == UPDATES
        columns[name] = table(gradients, updates)
        columns[name]["loss"] = max(abs(a - b) / b for a, b in zip(losses_of(run), losses, strict=True))
    print(
        f"\n| largest relative difference, {UPDATES} updates | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
    )
    for row in (*GROUPS, "loss"):
        print(f"| {row} | {' | '.join(format(column[row], '.1e') for column in columns.values())} |")
    print(json.dumps(columns))
    for name, column in columns.items():
        for row, difference in column.items():
            assert difference < 1e-5, (name, row)


@pytest.fixture(scope="module")
def streams(data, tmp_path_factory) -> dict[str, list[str]]:
    """Options of two trainings from a stream: of files that each process reads, and of files that they share out."""
    folder = tmp_path_factory.mktemp("shards")
    for split, paths in data.items():
        lines = [Path(path).read_text(encoding="utf-8").splitlines() for path in paths]
        rows = [{"source": source, "target": target} for source, target in zip(*lines, strict=True)]
        for shard, part in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
            table = pyarrow.Table.from_pylist(part)
            name = f"{'validation' if split == 'val' else split}-0000{shard}-of-00002.parquet"
            pyarrow.parquet.write_table(table, folder / name)
    common = ["--streaming", "true", "--stream_window", "40", "--max_length", "60", *SMALL]
    return {
        "shared": ["--train_files", *data["train"], "--eval_files", *data["val"], *common],
        "own": ["--dataset_name", str(folder), "--source_lang", "source", "--target_lang", "target", *common],
    }


@pytest.fixture(scope="module")
def two(data, alone, tmp_path_factory):
    """Runs of two processes: `ddp`, `fsdp`; `resumed`, by FSDP from a checkpoint of one process; and two that fail."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(alone[0] / "checkpoint-5", folder / "resumed" / "checkpoint-5")
    short = ["--max_steps", "2", "--eval_strategy", "no", "--metric_for_best_model", "loss"]
    jobs = [
        {"fsdp": False, "words": words(data, folder / "ddp")},
        {"fsdp": True, "words": words(data, folder / "fsdp")},
        {"fsdp": True, "words": words(data, folder / "resumed", "--resume")},
        {"fsdp": True, "words": words(data, folder / "spoilt", *short), "status": 1, "spoil": 1},
        {
            "fsdp": True,
            "words": words(data, folder / "pieces", *short),
            "status": 1,
            "environment": {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
        },
    ]
    return folder, launch(2, folder, jobs)


@pytest.fixture(scope="module")
def two_with_streams(streams, tmp_path_factory):
    """Runs of two processes: of each kind of stream, `KIND` and `KIND-stopped`, which goes on after update 5."""
    folder, jobs = tmp_path_factory.mktemp("streamed"), []
    for kind, options in streams.items():
        for name, more in ((kind, []), (f"{kind}-stopped", ["--max_steps", "5"]), (f"{kind}-stopped", ["--resume"])):
            jobs.append({"fsdp": False, "words": ["train", *options, "--output_dir", str(folder / name), *more]})
    assert launch(2, folder, jobs).count("in 2 batches on 2 devices") == 6
    return folder


def test_two_processes_learn_what_one_does_that_accumulates_and_what_one_batch_teaches(alone, two):
    run, losses, updates = alone
    assert two[1].count("in 2 batches on 2 devices") == 4
    compare({"1 x 4": run, "2 x 2 DDP": two[0] / "ddp", "2 x 2 FSDP2": two[0] / "fsdp"}, losses, updates)


@pytest.mark.slow
def test_four_processes_learn_what_one_does(data, alone, two, tmp_path):
    run, losses, updates = alone
    jobs = [{"fsdp": kind == "fsdp", "words": words(data, tmp_path / kind)} for kind in ("ddp", "fsdp")]
    assert launch(4, tmp_path, jobs).count("in 1 batch on 4 devices") == 2
    runs = {"1 x 4": run, "2 x 2 DDP": two[0] / "ddp", "2 x 2 FSDP2": two[0] / "fsdp"}
    compare({**runs, "4 x 1 DDP": tmp_path / "ddp", "4 x 1 FSDP2": tmp_path / "fsdp"}, losses, updates)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_processes_is_one_of_one_process(data, alone, two, kind, tmp_path):
    """It has the same files, loads with the same weights, and one process goes on from it."""
    checkpoint, expected = two[0] / kind / "checkpoint-5", alone[0] / "checkpoint-5"
    of_processes = {"rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"}
    files = [{path.name for path in folder.iterdir()} - of_processes for folder in (checkpoint, expected)]
    assert files[0] == files[1]
    assert {"modeling_vaswani.py", "model.safetensors", "optimizer.pt"} <= files[0]
    tensors = [set(load_file(folder / "model.safetensors")) for folder in (checkpoint, expected)]
    assert tensors[0] == tensors[1]
    mine, theirs = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (checkpoint, expected))
    assert mine.config.architectures == ["VaswaniForConditionalGeneration"]
    torch.testing.assert_close(dict(mine.named_parameters()), dict(theirs.named_parameters()), rtol=1e-4, atol=1e-6)

    shutil.copytree(checkpoint, tmp_path / "checkpoint-5")
    assert main(words(data, tmp_path, "--resume")) == 0
    assert losses_of(tmp_path) == pytest.approx(alone[1], rel=1e-5)
    assert len(losses_of(tmp_path)) == UPDATES


def test_two_processes_with_fsdp_go_on_from_a_checkpoint_of_one(alone, two):
    assert "missing keys" not in two[1]
    assert losses_of(two[0] / "resumed") == pytest.approx(alone[1], rel=1e-5)
    assert len(torch.load(two[0] / "resumed" / "gradients.pt")) == UPDATES - 5
    differences = table(torch.load(two[0] / "resumed" / "gradients.pt"), alone[2][5:])
    assert max(differences.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "own"])
def test_two_processes_go_on_in_their_streams(two_with_streams, kind):
    whole, stopped = two_with_streams / kind, two_with_streams / f"{kind}-stopped"
    positions = json.loads((stopped / "checkpoint-5" / "stream.json").read_text())
    assert len(positions) == 2
    assert all(position["windows"] > 0 for position in positions)
    assert (positions[0] == positions[1]) == (kind == "shared")
    assert losses_of(stopped) == losses_of(whole)
    assert len(losses_of(whole)) == UPDATES
    weights = [load_file(run / f"checkpoint-{UPDATES}" / "model.safetensors") for run in (whole, stopped)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.slow
def test_one_process_goes_on_in_the_stream_of_two(two_with_streams, streams, tmp_path):
    shutil.copytree(two_with_streams / "shared" / "checkpoint-5", tmp_path / "checkpoint-5")
    assert main(["train", *streams["shared"], "--output_dir", str(tmp_path), "--resume"]) == 0
    assert losses_of(tmp_path) == pytest.approx(losses_of(two_with_streams / "shared"), rel=1e-5)


@pytest.mark.slow
def test_another_number_of_processes_cannot_go_on_in_streams_of_their_own(two_with_streams, streams, tmp_path, capsys):
    shutil.copytree(two_with_streams / "own" / "checkpoint-5", tmp_path / "checkpoint-5")
    assert main(["train", *streams["own"], "--output_dir", str(tmp_path), "--resume"]) == 1
    assert "devices that read files of their own (2, now 1)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_evaluate_and_translate_as_one_does(alone, two, kind):
    """An odd number of sentences, of which each process translates its own."""
    expected = json.loads((alone[0] / "translations-0.json").read_text())
    assert len(expected) == 7
    assert [json.loads((two[0] / kind / f"translations-{rank}.json").read_text()) for rank in range(2)] == [
        expected[0::2],
        expected[1::2],
    ]
    mine, theirs = (history_of(run)[-2] for run in (two[0] / kind, alone[0]))  # the last is train_loss
    assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    assert mine["eval_bleu"] == pytest.approx(theirs["eval_bleu"])


def test_a_weight_that_is_no_number_on_another_device_is_not_saved(two):
    assert "After update 2, weights are not finite: model.shared.weight" in two[1]
    assert not list((two[0] / "spoilt").glob("**/*.safetensors"))


def test_weights_in_pieces_are_refused(two):
    assert "fsdp_state_dict_type is SHARDED_STATE_DICT: checkpoints are whole" in two[1]
    assert not list((two[0] / "pieces").glob("**/checkpoint*"))


@pytest.mark.slow
def test_two_processes_with_deepspeed_learn_and_go_on_as_one_does(data, alone, tmp_path):
    """By the configuration of ZeRO-2, on the CPU."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    config = ROOT / "training" / "recipes" / "accelerate" / "zero2.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", "2", "--main_process_port", "0", "-m", "training.train"]
    folders = os.pathsep.join([str(config.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": folders}
    run = tmp_path / "run"
    for more in (["--max_steps", "5"], ["--resume"]):
        done = subprocess.run(
            [*command, *words(data, run, *more)[1:]],
            capture_output=True,
            text=True,
            env={**environment, "DS_ACCELERATOR": "cpu"},
        )
        assert done.returncode == 0, done.stderr
        assert "in 2 batches on 2 devices" in done.stderr
    assert (run / "checkpoint-10" / "global_step10").is_dir()
    assert losses_of(run) == pytest.approx(alone[1], rel=1e-5)
    mine, theirs = (AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict() for folder in (run, alone[0]))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
