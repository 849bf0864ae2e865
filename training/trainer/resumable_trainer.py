"""`Seq2SeqTrainer` with atomic checkpoints and exact resumption.

A run that is killed at any moment resumes as if it had not been interrupted: with one process in float32 on a CPU,
weights and log are the same to the bit. A checkpoint appears only when it is complete. Besides the stock Trainer's
files it contains the loss since the last log. Losses and weights that are not finite are an error; they are not saved.
"""

import contextlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from .checkpoints import (
    PARTIAL,
    PROGRESS_NAME,
    STATE_NAME,
    checkpoint_name,
    clear_partial,
    complete_checkpoints,
    naming_what_failed,
    put_files_in_place,
    put_in_place,
    read_progress,
    regular_steps,
    rotate,
    write_checksums,
)
from .fsdp import are_finite
from .pushing import PushingTrainer
from .sharded_trainer import ShardedTrainer
from .signals import StopOnSignal


MANIFEST_NAME = "run.json"
LOSSES_REMEMBERED = 10_000  # scalars that tell in which update the loss was not finite


class AtTrainBegin(TrainerCallback):
    """Calls a function after the Trainer's set-up, before the first step."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def on_train_begin(self, args, state, control, **kwargs):
        self.function()


class ResumableTrainer(ShardedTrainer, PushingTrainer):
    """Takes the arguments of `Seq2SeqTrainer`.

    Args:
        manifest (`dict`, *optional*): Manifest of the run, written to `run.json` in each checkpoint.

    Attributes:
        saved_steps (`list[int]`): Steps of all checkpoints so far, without those written only because of a signal.

    Raises:
        ValueError: FSDP2 is configured to write sharded state dictionaries.
    """

    def __init__(self, *args, manifest: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.manifest = manifest
        self.saved_steps: list[int] = []
        self._writing = False  # a checkpoint
        self._resumed_from: str | None = None
        # The stock Trainer's sums of the loss are private, and not resumed.
        self._unlogged_loss = torch.tensor(0.0)  # sum over this device's batches since the last log
        self._logged_loss = 0.0  # sum over all updates before, mean over devices
        self._last_logged = 0
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=LOSSES_REMEMBERED)
        self.add_callback(AtTrainBegin(self._begin))

    # Saving

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._writing else folder

    def _save_checkpoint(self, model, trial) -> None:
        """Write the stock Trainer's checkpoint to `checkpoint.partial/`, and rename it when all processes are done."""
        self._check_finite()
        run, name = Path(self._get_output_dir(trial)), checkpoint_name(self.state.global_step)
        if not any(stop.alone for stop in self._stops()) and self.state.global_step not in self.saved_steps:
            self.saved_steps.append(self.state.global_step)
        with self._naming_what_failed(run, name):
            self._writing = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._writing = False
            self._remember_best(run)
            self._add_to_checkpoint(run / PARTIAL / name)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                write_checksums(run / PARTIAL / name)
                put_in_place(run / PARTIAL / name, run / name)
                rotate(run, self.args.save_total_limit, self._checkpoints_to_keep(run), self.saved_steps)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self.push_checkpoint(run / name)

    def _remember_best(self, run: Path) -> None:
        """Set the path of the best checkpoint. The stock Trainer looks for it in `checkpoint.partial/`, and forgets it
        if the run's folder has moved."""
        best = self.state.best_global_step
        if best and (best == self.state.global_step or (run / checkpoint_name(best)).is_dir()):
            self.state.best_model_checkpoint = str(run / checkpoint_name(best))

    def _checkpoints_to_keep(self, run: Path) -> set[Path]:
        """Checkpoints that rotation must not delete: the one just written and the best."""
        keep = {run / checkpoint_name(self.state.global_step)}
        return keep | ({Path(self.state.best_model_checkpoint)} if self.state.best_model_checkpoint else set())

    def _add_to_checkpoint(self, folder: Path) -> None:
        """Add the files that the stock Trainer does not write. Collective: every process must call it."""
        progress = {
            "total_loss": self._logged_loss,
            "last_logged": self._last_logged,
            "saved_steps": self.saved_steps,
            "processes": gather_object([self._progress()]),
        }
        if not self.args.should_save:
            return
        self.state.save_to_json(str(folder / STATE_NAME))  # again, now with the path of the best checkpoint
        (folder / PROGRESS_NAME).write_text(json.dumps(progress) + "\n", encoding="utf-8")
        if self.manifest is not None:
            (folder / MANIFEST_NAME).write_text(json.dumps(self.manifest, indent=2) + "\n", encoding="utf-8")

    def save_run(self) -> None:
        """Write the model, the tokenizer and the Trainer's state to the run's own folder, each file atomically."""
        self._check_finite()
        run = Path(self.args.output_dir)
        with self._naming_what_failed(run, "the final model"):
            self.save_model(str(run / PARTIAL / "final"), _internal_call=True)
            if self.args.should_save:
                self.state.save_to_json(str(run / PARTIAL / "final" / STATE_NAME))
                put_files_in_place(run / PARTIAL / "final", run)
                shutil.rmtree(run / PARTIAL, ignore_errors=True)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _naming_what_failed(self, run: Path, name: str) -> contextlib.AbstractContextManager:
        def clean_up() -> str:
            if self.args.should_save:
                clear_partial(run)
            return _last(run)

        return naming_what_failed(run, f"{name} could not be written after update {self.state.global_step}", clean_up)

    # Stopping

    def _stops(self) -> list[StopOnSignal]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, StopOnSignal)]

    def _stop_requested(self) -> bool:
        return any(stop.stopped_by for stop in self._stops())

    def save_before_evaluation(self) -> None:
        """Save a checkpoint if a signal stops the training, because a scheduler may not wait for the evaluation.

        The checkpoint is written again after the evaluation, with the result.
        """
        if self.is_in_train and self._stop_requested():
            self._save_checkpoint(self.model, None)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Evaluate like the stock Trainer, after `save_before_evaluation`."""
        self.save_before_evaluation()
        return super().evaluate(*args, **kwargs)

    def _determine_best_metric(self, metrics, trial) -> bool:
        """With `save_strategy="best"`, also save a checkpoint that is not the best if a signal stops the training."""
        return super()._determine_best_metric(metrics, trial) or self._stop_requested()

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> TrainOutput:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # the stock Trainer's error
        self._resumed_from = resume_from_checkpoint or None
        limit = self.args.save_total_limit
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.save_total_limit = limit  # see `log`
        return TrainOutput(output.global_step, output.metrics["train_loss"], output.metrics)

    def _begin(self) -> None:
        """Clean up after a run that was killed, and restore the progress of the checkpoint.

        Raises:
            OSError: The run's folder is not writable, which would otherwise come out at the first checkpoint only.
        """
        run = Path(self.args.output_dir)
        self._unlogged_loss = torch.tensor(0.0, device=self.args.device)
        self._logged_loss, self._last_logged = 0.0, self.state.global_step
        if self.args.should_save:
            clear_partial(run)
            (run / PARTIAL).mkdir(parents=True)
            (run / PARTIAL).rmdir()
        if self._resumed_from is None:
            return
        self.saved_steps = regular_steps(Path(self._resumed_from))
        self._remember_best(run)
        if self.args.should_save:
            rotate(run, self.args.save_total_limit, self._checkpoints_to_keep(run), self.saved_steps)
        self.state.compute_steps(self.args, self.state.max_steps)  # the stock Trainer keeps those of the checkpoint
        progress = read_progress(Path(self._resumed_from))
        self._resumed_from = None
        if progress is None:
            return
        self._logged_loss, self._last_logged = progress["total_loss"], progress["last_logged"]
        processes = progress["processes"]
        if len(processes) != self.args.world_size:
            means = {name: sum(one[name] for one in processes) / len(processes) for name in processes[0]}
            processes = [means] * self.args.world_size
        self._restore_progress(processes[self.args.process_index])

    def _progress(self) -> dict[str, float]:
        """Counts of this process since the last log."""
        return {"loss": self._unlogged_loss.item()}

    def _restore_progress(self, progress: dict[str, float]) -> None:
        self._unlogged_loss += progress["loss"]

    def _run_epoch(self, **kwargs) -> None:
        """Train no step if the resumed run had taken all of them, or if a callback stops the training at once.

        The stock Trainer would take one step.
        """
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    # Loss

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        """Add up the loss on the device, without waiting for it."""
        loss = super().training_step(*args, **kwargs)
        self._losses.append((self.state.global_step + 1, loss))
        if self.args.logging_nan_inf_filter and not loss.isfinite():  # as the stock Trainer filters its own sum
            self._unlogged_loss += self._unlogged_loss / (1 + self.state.global_step - self._last_logged)
        else:
            self._unlogged_loss += loss
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean `loss` since the last log, and at the end the mean `train_loss` of all updates, resumed or not.

        Raises:
            ValueError: The loss is not finite.
        """
        if "loss" in logs:
            logs["loss"] = self._mean_loss()
        if "train_loss" in logs:  # the training has ended
            total = self._logged_loss + self._unlogged_loss.item()
            logs["train_loss"] = total / max(self.state.global_step, 1)
            # With a limit of 1, the stock Trainer would now delete the last checkpoint if another one is the best,
            # even if the training was only stopped. `train` restores the limit.
            self.args.save_total_limit = None
        super().log(logs, start_time)

    def _mean_loss(self) -> float:
        """Mean loss of the updates since the last log over all devices. Collective: every process must call it."""
        loss = self.accelerator.gather(self._unlogged_loss).mean().item()
        updates = self.state.global_step - self._last_logged
        if not math.isfinite(loss):
            self._raise_not_finite(loss / updates)
        self._unlogged_loss.zero_()
        self._logged_loss += loss
        self._last_logged = self.state.global_step
        self._losses.clear()
        return loss / updates

    def _check_finite(self) -> None:
        """Raise ValueError if the loss since the last log, or a weight, is not finite."""
        if not math.isfinite(loss := self._unlogged_loss.item()):
            self._raise_not_finite(loss)
        weights = dict(self.model.named_parameters())
        finite = are_finite(list(weights.values()))
        if wrong := [name for name, is_finite in zip(weights, finite) if not is_finite]:
            raise ValueError(
                f"After update {self.state.global_step}, weights are not finite: {', '.join(wrong[:3])}"
                f"{', ...' if len(wrong) > 3 else ''}. They are not saved. {_last(self.args.output_dir)}"
            )

    def _raise_not_finite(self, loss: float) -> NoReturn:
        finite = torch.stack([loss for _, loss in self._losses]).isfinite().tolist()
        wrong = [step for (step, _), is_finite in zip(self._losses, finite) if not is_finite]
        # If it is finite on this device, it is not on another one.
        where = f"update {wrong[0]}" if wrong else f"an update from {self._losses[0][0]} to {self._losses[-1][0]}"
        raise ValueError(f"The loss of {where} is {loss}. Nothing is saved. {_last(self.args.output_dir)}")


def _last(run: str | Path) -> str:
    checkpoints = complete_checkpoints(run)
    return f"The last good checkpoint is {checkpoints[-1]}." if checkpoints else "There is no earlier checkpoint."
