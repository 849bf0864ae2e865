"""Trains as `hf-vaswani train` does, and keeps what every update learned from.

Run as a script by test_distributed.py, under `accelerate launch` in some processes on the CPU:
`distributed_training.py JOBS`, a JSON file with a list of jobs, done one after the other:
`{"fsdp": bool, "words": [of hf-vaswani], "status": expected, "environment": {...}, "spoil": rank}`, of which the last
three may be missing; the process `spoil` makes its part of a weight a NaN. The run's folder gets `gradients.pt`, for
each update the gradients by name, and `translations-RANK.json`, those of the last evaluation.
"""

import functools
import gc
import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import training.trainer.onednn
import training.trainer.run
import training.trainer.trainer
from training.cli import main
from training.trainer.trainer import VaswaniTrainer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Gradients(TrainerCallback):
    def __init__(self):
        self.updates = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.updates.append({name: whole(weight.grad) for name, weight in model.named_parameters()})

    def on_train_end(self, args, state, control, **kwargs):
        if args.process_index == 0:
            torch.save(self.updates, Path(args.output_dir) / "gradients.pt")


class Spoil(TrainerCallback):
    """Makes the last element of one process's part of the embedding a NaN, after the last update."""

    def __init__(self, rank: int):
        self.rank = rank

    def on_step_end(self, args, state, control, model, **kwargs):
        if args.process_index == self.rank and state.global_step == state.max_steps:
            with torch.no_grad():
                model.get_input_embeddings().weight.to_local()[-1, -1] = float("nan")


class RecordingTrainer(VaswaniTrainer):
    def __init__(self, *args, more: tuple[TrainerCallback, ...] = (), **kwargs):
        fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if fsdp:  # Accelerate takes it for a matter of accelerators; it works on CPUs all the same
            PartialState().distributed_type = DistributedType.MULTI_GPU
        super().__init__(*args, **kwargs)
        assert self.accelerator.is_fsdp2 == fsdp
        for callback in (Gradients(), *more):
            self.add_callback(callback)

    def _bleu(self, dataset, options) -> float:
        translations, original = [], training.trainer.trainer.translate

        def translate(*args, **kwargs):
            translations.extend(original(*args, **kwargs))
            return translations

        training.trainer.trainer.translate = translate
        try:
            return super()._bleu(dataset, options)
        finally:
            training.trainer.trainer.translate = original
            path = Path(self.args.output_dir) / f"translations-{self.args.process_index}.json"
            path.write_text(json.dumps(translations))


def set_up(job: dict) -> None:
    AcceleratorState._reset_state()
    os.environ.update({"ACCELERATE_USE_FSDP": str(job["fsdp"]).lower(), **job.get("environment", {})})
    more = (Spoil(job["spoil"]),) if "spoil" in job else ()
    training.trainer.run.VaswaniTrainer = functools.partial(RecordingTrainer, more=more)


NARROWEST = 16  # of layers that oneDNN trains: here all of them


if __name__ == "__main__":
    gc.freeze()  # as conftest.py does
    training.trainer.onednn.NARROWEST = NARROWEST
    for job in json.loads(Path(sys.argv[1]).read_text()):
        set_up(job)
        if (status := main(job["words"])) != job.get("status", 0):
            sys.exit(f"{job}: ended with {status}")
