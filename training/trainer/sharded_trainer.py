"""`Seq2SeqTrainer` that loads checkpoints strictly, and writes those of FSDP2 in the format of one device.

All overrides of the Trainer's private methods for saving and loading are in this class. They have no public form.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import torch
from transformers import Seq2SeqTrainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..inference.checkpoint_files import check_fit, one_line_errors
from .fsdp import embeddings_in_root, in_its_own_class, load_optimizer_state, load_weights, optimizer_state


class ShardedTrainer(Seq2SeqTrainer):
    """Base class that takes the arguments of `Seq2SeqTrainer`.

    Any number of devices can resume a checkpoint of FSDP2, whatever the number that wrote it. With FSDP2 and half
    precision, only the forward and backward passes are in half precision: gradients are reduced in float32.

    Raises:
        ValueError: FSDP2 is configured to write sharded state dictionaries, which nothing else reads.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not self.accelerator.is_fsdp2:
            return
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.state_dict_type.name != "FULL_STATE_DICT":
            raise ValueError(
                f"fsdp_state_dict_type is {plugin.state_dict_type.name}: checkpoints are whole, so that any number of "
                "devices goes on from them. Set it to FULL_STATE_DICT."
            )
        if plugin.mixed_precision_policy:
            plugin.mixed_precision_policy = dataclasses.replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )

    def _prepare_for_training(self, *args, **kwargs):
        with embeddings_in_root(self.model) if self.accelerator.is_fsdp2 else contextlib.nullcontext():
            return super()._prepare_for_training(*args, **kwargs)

    # Saving

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.accelerator.is_fsdp2:  # FSDP2 gathers a tied matrix once under each of its names
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        with in_its_own_class(self.model):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.accelerator.is_fsdp2:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = optimizer_state(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        with one_line_errors(resume_from_checkpoint):
            if self.accelerator.is_fsdp2:
                self._issue_warnings_after_load(load_weights(self.model, resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with one_line_errors(self.state.best_model_checkpoint):
            if self.accelerator.is_fsdp2:
                self._issue_warnings_after_load(load_weights(self.model, self.state.best_model_checkpoint))
            else:
                super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.accelerator.is_fsdp2 or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = (
            torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        load_optimizer_state(self.model, self.optimizer, optimizer)
        self.lr_scheduler.load_state_dict(scheduler)

    def _issue_warnings_after_load(self, load_result) -> None:
        """Refuse weights that do not fit, where the stock Trainer warns and continues.

        A tied matrix is saved under only one of its names, so its other names are not missing.

        Raises:
            ValueError: Weights are missing or unexpected.
        """
        tied = set(self.model.all_tied_weights_keys)
        keys = {"missing": set(load_result.missing_keys) - tied, "unexpected": set(load_result.unexpected_keys) - tied}
        check_fit("The checkpoint", keys)
