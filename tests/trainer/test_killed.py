import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, SUPPORT
from training.demo_data import write_demo_data


MODEL = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1}
# Three epochs; a log is due where no checkpoint is, and the other way round; old checkpoints are deleted.
SMALL = [
    *("--model_overrides", json.dumps(MODEL), "--vocab_size", "300", "--warmup_steps", "4"),
    *("--source_tokens_per_update", "2000", "--target_tokens_per_update", "2000", "--tokens_per_device", "1000"),
    *("--max_steps", "14", "--save_steps", "2", "--logging_steps", "3", "--eval_steps", "4"),
    *("--average", "ema", "--ema_decay", "0.9", "--eval_average", "true"),
    *("--save_total_limit", "2", "--generation_num_beams", "1", "--generation_max_length", "12"),
    *("--disable_tqdm", "true"),
]
TIMES = {"train_runtime", "train_steps_per_second", "eval_runtime", "target_tokens_per_second"}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    files = write_demo_data(str(tmp_path_factory.mktemp("data")), train=200, val=4, test=4)
    files = {split: [str(path) for path in paths] for split, paths in files.items()}
    return ["train", "--train_files", *files["train"], "--eval_files", *files["val"], *SMALL]


def work(folder: Path, jobs: list[dict]) -> list[dict]:
    """Reports of `killed_training.py` on the jobs; each ends with a finished training."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    files = [str(folder / "jobs.json"), str(folder / "reports.json")]
    command = [sys.executable, str(SUPPORT / "killed_training.py"), *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = json.loads((folder / "reports.json").read_text())
    assert [report["ends"][-1] for report in reports] == [0] * len(jobs), done.stderr
    return reports


def job(run: Path, words: list[str], *moments: tuple[str, float]) -> dict:
    return {"run": str(run), "words": [*words, "--output_dir", str(run)], "moments": moments}


def ending(run: Path) -> tuple:
    """The bytes of all weights that are left, averaged ones too, and the log without what depends on the clock."""
    state = json.loads((run / "trainer_state.json").read_text())
    log = [{name: value for name, value in entry.items() if name not in TIMES} for entry in state["log_history"]]
    assert [entry["step"] for entry in log if "loss" in entry] == [3, 6, 9, 12]
    assert log[-1]["epoch"] > 2
    weights = sorted(run.glob("**/*.safetensors"))
    assert {run / "model.safetensors", run / "average-ema" / "model.safetensors"} <= set(weights)
    return {str(path.relative_to(run)): path.read_bytes() for path in weights}, log


def test_a_training_killed_in_an_update_and_within_a_checkpoint_ends_as_if_it_had_not_been(tmp_path, words):
    """Killed in the first update after a checkpoint of the second epoch, and then before the next is renamed."""
    moments = [("batch", 19), ("rename", 2)]  # the first is that of its moving average
    jobs = [job(tmp_path / "whole", words), job(tmp_path / "killed", words, *moments)]
    reports = work(tmp_path, jobs)
    assert reports[1]["ends"] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert reports[1]["partial"] == [False, True, False]
    assert ending(tmp_path / "killed") == ending(tmp_path / "whole")


@pytest.mark.slow
def test_trainings_killed_at_any_moment_end_as_if_they_had_not_been(tmp_path, words):
    moments = random.Random(1)
    reports = work(tmp_path, [job(tmp_path / "whole", words)])
    files, seconds = reports[0]["events"], reports[0]["seconds"]
    kinds = [("file", moments.randrange(1, files)) for _ in range(12)]
    kinds += [("seconds", moments.uniform(0.1, 0.95) * seconds) for _ in range(8)]
    reports = work(tmp_path, [job(tmp_path / str(i), words, kind) for i, kind in enumerate(kinds)])
    expected = ending(tmp_path / "whole")
    identical = [ending(tmp_path / str(i)) == expected for i in range(20)]
    print(
        f"{sum(identical)} of 20 endings identical; {sum(r['partial'][0] for r in reports)} killed within a checkpoint"
    )
    assert identical == [True] * 20
    assert all(report["ends"][0] == -signal.SIGKILL for report in reports[:12])
    assert any(report["partial"][0] for report in reports)
