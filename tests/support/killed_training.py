"""Trains in processes of its own that are killed at given moments, and goes on until the training is done.

Run as a script by test_killed.py: `python killed_training.py JOBS REPORTS`. The first is a JSON file, a list of jobs
`{"run": folder, "words": [of `hf-vaswani train`, without --resume], "moments": [...]}`. A moment is `["file", n]`:
before the n-th thing that happens to a file of the run; `["rename", n]`: before the n-th renaming there;
`["batch", n]`: within the n-th batch; `["seconds", s]`: whenever that may be. After the last moment the training is
left alone. The other file gets an object for each job: how each process ended, which of them left a half-written
checkpoint, and what the last did to files, in how many seconds.

The training is forked off a process that has imported all it needs, which takes longer than to train.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import training.trainer.run  # noqa: F401, before the forks, which would each import it
from training.cli import main
from training.trainer.checkpoints import PARTIAL, complete_checkpoints
from training.trainer.trainer import VaswaniTrainer


EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
KINDS = ("file", "rename")


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FileEvents:
    """Counts what happens to the files of a folder, as Python's audit hooks see it; kills before the `last`."""

    def __init__(self, folder: str, events: set[str], last: int | None):
        self.folder, self.events, self.last, self.count = folder, events, last, 0
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple) -> None:
        # rmtree names what it deletes relative to the folder that it is in.
        if event in self.events and (event in ("os.remove", "os.rmdir") or str(args[0]).startswith(self.folder)):
            self.count += 1
            if self.count == self.last:
                kill_myself()


def kill_within_batch(last: int) -> None:
    original, batches = VaswaniTrainer.compute_loss, []

    def compute_loss(self, *args, **kwargs):
        batches.append(1)
        if len(batches) == last:
            kill_myself()
        return original(self, *args, **kwargs)

    VaswaniTrainer.compute_loss = compute_loss


def train(run: str, words: list[str], kind: str | None, moment: float | None) -> int:
    """Forks a training; its status as of `os.waitpid`."""
    child = os.fork()
    if not child:
        events = FileEvents(run, {"os.rename"} if kind == "rename" else EVENTS, moment if kind in KINDS else None)
        if kind == "batch":
            kill_within_batch(moment)
        status = main([*words, *(["--resume"] if complete_checkpoints(run) else [])])
        Path(f"{run}.events").write_text(str(events.count))
        os._exit(status)
    if kind == "seconds":
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def work(job: dict) -> dict:
    Path(job["run"]).mkdir(parents=True)
    ends, partial = [], []
    for kind, moment in [*job["moments"], (None, None)]:
        started = time.monotonic()
        status = train(job["run"], job["words"], kind, moment)
        seconds = time.monotonic() - started
        ends.append(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        partial.append((Path(job["run"]) / PARTIAL).exists())
    return {
        "ends": ends,
        "partial": partial,
        "events": int(Path(f"{job['run']}.events").read_text()),
        "seconds": seconds,
    }


if __name__ == "__main__":
    gc.freeze()  # as conftest.py does
    reports = [work(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(reports))
