"""A `Seq2SeqTrainer` of whose work nothing is lost: killed at any moment, it goes on as if it had not been.

Checkpoints appear whole or not at all, with the little that the stock Trainer forgets: the loss that was not logged
yet. So one process, in float32 on a CPU, ends with the same weights and the same log to the bit. Weights and losses
that are no numbers are an error before they are saved.
"""

import contextlib
import dataclasses
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
from huggingface_hub import CommitInfo
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import HubStrategy, TrainOutput
from transformers.utils import PushInProgress

from ..inference.checkpoint_files import check_fit, naming
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
from .fsdp import are_finite, in_its_own_class, load_optimizer_state, load_weights, optimizer_state
from .pushing import push_model
from .signals import StopOnSignal


MANIFEST_NAME = "run.json"
LOSSES_REMEMBERED = 10_000  # scalars, to name the update whose loss is no number


class AtTrainBegin(TrainerCallback):
    """Calls a function when the Trainer has set itself up, and before its first step."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def on_train_begin(self, args, state, control, **kwargs):
        self.function()


class ResumableTrainer(Seq2SeqTrainer):
    """Takes the arguments of `Seq2SeqTrainer`.

    Args:
        manifest (`dict`, *optional*): What makes the run what it is, written to `run.json` in each checkpoint.

    Raises:
        ValueError: FSDP2 is set up to write weights in pieces that nothing else reads.
    """

    def __init__(self, *args, manifest: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        if self.accelerator.is_fsdp2 and self.accelerator.state.fsdp_plugin.state_dict_type.name != "FULL_STATE_DICT":
            raise ValueError(
                f"fsdp_state_dict_type is {self.accelerator.state.fsdp_plugin.state_dict_type.name}: checkpoints are "
                "whole, so that any number of devices goes on from them. Set it to FULL_STATE_DICT."
            )
        if self.accelerator.is_fsdp2 and (policy := self.accelerator.state.fsdp_plugin.mixed_precision_policy):
            # In half precision the devices compute; sums of gradients and the loss stay in float32.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = dataclasses.replace(
                policy, reduce_dtype=torch.float32, output_dtype=None
            )
        self.manifest = manifest
        self._writing = False
        self._resumed_from: str | None = None
        self.saved_steps: list[int] = []  # of all checkpoints but those of an interruption
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=LOSSES_REMEMBERED)
        self.add_callback(AtTrainBegin(self._begin))

    # Writing

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._writing else folder

    def _save_checkpoint(self, model, trial) -> None:
        """The stock Trainer's checkpoint, written beside its place and renamed when all processes are done."""
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
            self._push_from_checkpoint(str(run / name))

    # Pushing

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> CommitInfo | None:
        """The stock Trainer's push, of the files that make the model and its card alone; saves them first.

        Args:
            commit_message, blocking, token, revision, private: As of the stock Trainer.
            **kwargs: For `create_model_card`.

        Returns:
            The commit, or a `Future` of it where nobody waits; `None` in other processes than the first.
        """
        args, token = self.args, token or self.args.hub_token
        self.callback_handler.on_push_begin(args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        model_name = kwargs.pop("model_name", None) or self.hub_model_id.split("/")[-1]
        self.create_model_card(model_name=model_name, **kwargs)
        self._finish_current_push()
        places = Path(args.output_dir), self.hub_model_id
        options = {"token": token, "revision": revision or args.hub_revision, "blocking": blocking}
        return push_model(*places, commit_message, **options)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes the weights of a checkpoint that is complete, and not its optimiser's state and other pickles."""
        if self._writing or not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if not isinstance(self.model, PreTrainedModel):  # adapters alone, which name the folder of their base model
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder, places = Path(checkpoint_folder), [None]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            places.append("last-checkpoint" if self.args.hub_strategy == HubStrategy.CHECKPOINT else folder.name)
        message = f"Training in progress, step {self.state.global_step}"
        options = {"token": self.args.hub_token, "revision": self.args.hub_revision, "blocking": False}
        jobs = [push_model(folder, self.hub_model_id, message, place, **options) for place in places]
        if busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)

    def _stops(self) -> list[StopOnSignal]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, StopOnSignal)]

    def _evaluate(self, trial, ignore_keys_for_eval, *args, **kwargs) -> dict[str, float]:
        """Where the run is asked to stop, a checkpoint comes first, for those who will not wait for the evaluation;
        it is written again afterwards, with the result."""
        if any(stop.stopped_by for stop in self._stops()):
            self._save_checkpoint(self.model, trial)
        return super()._evaluate(trial, ignore_keys_for_eval, *args, **kwargs)

    def _determine_best_metric(self, metrics, trial) -> bool:
        """With `save_strategy="best"` only what this is true of is saved; where the run is asked to stop, all is."""
        return super()._determine_best_metric(metrics, trial) or any(stop.stopped_by for stop in self._stops())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """With FSDP2 too what one device would write, so that any number of devices can go on from it."""
        if not self.accelerator.is_fsdp2:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = optimizer_state(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.accelerator.is_fsdp2:  # gathered, a tied matrix is one for each of its names
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        with in_its_own_class(self.model):
            super()._save(output_dir, state_dict)

    def _remember_best(self, run: Path) -> None:
        """The stock Trainer looks for it where it writes, and forgets it when the run's folder has moved."""
        best = self.state.best_global_step
        if best and (best == self.state.global_step or (run / checkpoint_name(best)).is_dir()):
            self.state.best_model_checkpoint = str(run / checkpoint_name(best))

    def _checkpoints_to_keep(self, run: Path) -> set[Path]:
        """What no rotation may delete: the checkpoint just written, and the best."""
        keep = {run / checkpoint_name(self.state.global_step)}
        return keep | ({Path(self.state.best_model_checkpoint)} if self.state.best_model_checkpoint else set())

    def _add_to_checkpoint(self, folder: Path) -> None:
        """What the stock Trainer does not write; called in all processes."""
        progress = {
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "saved_steps": self.saved_steps,
            "processes": gather_object([self._progress()]),
        }
        if not self.args.should_save:
            return
        self.state.save_to_json(str(folder / STATE_NAME))  # again: the best checkpoint is known only now
        (folder / PROGRESS_NAME).write_text(json.dumps(progress) + "\n", encoding="utf-8")
        if self.manifest is not None:
            (folder / MANIFEST_NAME).write_text(json.dumps(self.manifest, indent=2) + "\n", encoding="utf-8")

    def save_run(self) -> None:
        """The model, the tokenizer and the Trainer's state in the run's own folder, no file of them half written."""
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
        def then() -> str:
            if self.args.should_save:
                clear_partial(run)
            return _last(run)

        return naming_what_failed(run, f"{name} could not be written after update {self.state.global_step}", then)

    # Going on

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> TrainOutput:
        if isinstance(resume_from_checkpoint, str):  # DeepSpeed loads its checkpoints otherwise than by the below
            self._resumed_from = resume_from_checkpoint
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        with naming(resume_from_checkpoint):
            if self.accelerator.is_fsdp2:
                self._issue_warnings_after_load(load_weights(self.model, resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._resumed_from = resume_from_checkpoint

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.accelerator.is_fsdp2 or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        states = (
            torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        load_optimizer_state(self.model, self.optimizer, next(states))
        self.lr_scheduler.load_state_dict(next(states))

    def _load_best_model(self) -> None:
        with naming(self.state.best_model_checkpoint):
            if self.accelerator.is_fsdp2:
                self._issue_warnings_after_load(load_weights(self.model, self.state.best_model_checkpoint))
            else:
                super()._load_best_model()

    def _issue_warnings_after_load(self, load_result) -> None:
        """The stock Trainer would go on with weights that are missing, after a warning.

        Raises:
            ValueError: Weights are missing or unexpected.
        """
        tied = set(self.model.all_tied_weights_keys)
        keys = {"missing": set(load_result.missing_keys) - tied, "unexpected": set(load_result.unexpected_keys) - tied}
        check_fit("The checkpoint", keys)

    def _begin(self) -> None:
        """Cleans up after a run that was killed, and takes up what it had counted.

        Raises:
            OSError: Nothing can be written to the run's folder; better known now than at the first checkpoint.
        """
        run = Path(self.args.output_dir)
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
        self.state.compute_steps(self.args, self.state.max_steps)  # the stock Trainer keeps to those of the checkpoint
        saved = read_progress(Path(self._resumed_from))
        self._resumed_from = None
        if saved is None:
            return
        self._total_loss_scalar, self._globalstep_last_logged = saved["total_loss"], saved["last_logged"]
        processes = saved["processes"]
        if len(processes) != self.args.world_size:
            means = {name: sum(one[name] for one in processes) / len(processes) for name in processes[0]}
            processes = [means] * self.args.world_size
        self._restore_progress(processes[self.args.process_index])

    def _progress(self) -> dict[str, float]:
        """What this process has counted since the last log."""
        return {"loss": self._tr_loss.item()}

    def _restore_progress(self, progress: dict[str, float]) -> None:
        self._tr_loss += progress["loss"]

    def _run_epoch(self, **kwargs) -> None:
        """The stock Trainer takes one step too many where a run is resumed that had taken all of them, or that a
        callback stops at its beginning."""
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _finalize_training(self, *args, **kwargs) -> TrainOutput:
        """With `save_total_limit=1`, the stock Trainer deletes the last checkpoint here if another one is the best,
        even where a run is only stopped."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        return output._replace(training_loss=output.metrics["train_loss"])

    # What is no number

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._losses.append((self.state.global_step + 1, loss))  # nothing waits for the device here
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Refuses a loss that is no number; the mean loss at the end is that of the whole run, resumed or not."""
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                self._raise_not_finite(logs["loss"])
            self._losses.clear()
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _check_finite(self) -> None:
        """Raises ValueError where the loss since the last log, or a weight, is no number."""
        if not math.isfinite(loss := self._tr_loss.item()):
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
        # On another device, where none is wrong on this one.
        where = f"update {wrong[0]}" if wrong else f"an update from {self._losses[0][0]} to {self._losses[-1][0]}"
        raise ValueError(f"The loss of {where} is {loss}. Nothing is saved. {_last(self.args.output_dir)}")


def _last(run: str | Path) -> str:
    checkpoints = complete_checkpoints(run)
    return f"The last good checkpoint is {checkpoints[-1]}." if checkpoints else "There is no earlier checkpoint."
