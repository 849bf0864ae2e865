"""Averages of weights (section 6.1): means of checkpoints, and an exponential moving average."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import TrainerState

from hf_vaswani import VaswaniForConditionalGeneration

from ..files import folder_written_whole
from ..inference.loading import load_model, load_tokenizer
from ..json_records import read_record
from .arguments import VaswaniTrainingArguments
from .checkpoints import (
    checkpoint_folders,
    checkpoint_name,
    checkpoint_step,
    complete_checkpoints,
    naming_what_failed,
    regular_steps,
)


logger = logging.getLogger(__name__)


RECORD = "averaged_from.json"


def last_checkpoints(run: str, count: int) -> list[Path]:
    """The last `count` regular checkpoints of a run, oldest first.

    Checkpoints written on an interruption are excluded. An older checkpoint, kept as the best, does not replace a
    deleted one.

    Raises:
        ValueError: The run wrote fewer checkpoints, or one of the last is missing.
    """
    complete = complete_checkpoints(run)
    steps = regular_steps(complete[-1])[-count:] if complete else []
    if len(steps) < count:
        raise ValueError(f"{run}: expected {count} checkpoints, found {len(steps)}.")
    checkpoints = [Path(run) / checkpoint_name(step) for step in steps]
    if missing := [folder.name for folder in checkpoints if folder not in complete]:
        raise ValueError(
            f"{run}: of the last {count} checkpoints, these are missing: {', '.join(missing)}. "
            "Average fewer, or name others with --checkpoints."
        )
    return checkpoints


def average(
    checkpoints: list[str | Path],
    output: str,
    notes: dict | None = None,
    replace: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Write the mean of the checkpoints' weights, with the tokenizer and settings of the last one.

    Args:
        checkpoints (`list[str | Path]`): Checkpoint folders, with the same configuration.
        output (`str`): Folder to write, atomically. Its `averaged_from.json` lists the checkpoints.
        notes (`dict`, *optional*): Further entries of `averaged_from.json`.
        replace (`bool`): Replace an existing average.
        trust_remote_code (`bool`): See `load_tokenizer`.

    Raises:
        ValueError: No checkpoints, different configurations, adapters, or a model that `load_model` refuses.
        FileExistsError: `output` exists already.
    """
    if not checkpoints:
        raise ValueError("No checkpoints to average.")
    check_output(Path(output), replace)
    sums: dict[str, torch.Tensor] = {}
    for folder in checkpoints:
        model = load_model(folder, VaswaniForConditionalGeneration, dtype=torch.float32)
        config = model.config.to_diff_dict()
        if not sums:
            first_config = config
        if config != first_config:
            differing = sorted(k for k in config.keys() | first_config.keys() if config.get(k) != first_config.get(k))
            raise ValueError(f"{folder} differs from {checkpoints[0]} in {', '.join(differing)}.")
        for name, weight in model.named_parameters():  # yields tied matrices once
            sums[name] = sums.get(name, 0) + weight.detach().double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(sums[name] / len(checkpoints))

    record = {"method": "mean of the weights", "checkpoints": [str(folder) for folder in checkpoints], **(notes or {})}
    write_checkpoint(model, load_tokenizer(checkpoints[-1], trust_remote_code), Path(output), record, replace)


def check_output(output: Path, replace: bool) -> None:
    """Raise FileExistsError for an existing output; with `replace`, for one that is not an average."""
    if os.path.lexists(output) and not (replace and (output / RECORD).is_file() and not output.is_symlink()):
        raise FileExistsError(f"{output} exists already.")


def write_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path, record: dict, replace: bool = False
) -> None:
    """Write averaged weights atomically as an ordinary checkpoint folder.

    Args:
        model (`PreTrainedModel`): Model with the averaged weights.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer to save with the model.
        output (`Path`): Folder to write.
        record (`dict`): Content of `averaged_from.json`.
        replace (`bool`): Replace an existing average.

    Raises:
        FileExistsError: `output` exists already.
        OSError: Writing failed.
    """
    check_output(output, replace)
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        naming_what_failed(output.parent, f"{output.name} could not be written", lambda: None),
        folder_written_whole(output, replace) as partial,
    ):
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


EMA_NAME = "ema"  # folder in each checkpoint


class AverageFile(TypedDict):
    """Fields of `averaged_from.json`."""

    checkpoints: NotRequired[list[str]]
    updates: NotRequired[int]


class MovingAverageFile(TypedDict):
    """Fields of a moving average's `averaged_from.json`."""

    updates: int


class MovingAverage(TrainerCallback):
    """Exponential moving average of the weights.

    The average starts as the weights after the first update. Each further update makes it
    `decay * average + (1 - decay) * weights`.

    Args:
        model (`PreTrainedModel`): Model to average; the average has the same device and dtype.
        decay (`float`): Weight of the previous average.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.averaged.update_parameters(model)

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the context, by swapping storage; no tensor is copied."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def _swap(self, model: nn.Module) -> None:
        for averaged, weight in zip(self.averaged.module.parameters(), model.parameters()):
            averaged.data, weight.data = weight.data, averaged.data

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, replace: bool = False) -> None:
        """Write the average as an ordinary checkpoint."""
        updates = int(self.averaged.n_averaged)
        record = {"method": "exponential moving average of the weights", "decay": self.decay, "updates": updates}
        write_checkpoint(self.averaged.module, tokenizer, folder, record, replace)

    def load(self, folder: Path) -> None:
        """Restore a saved average.

        Raises:
            FileNotFoundError: The folder has no average.
        """
        if not (folder / RECORD).is_file():
            raise FileNotFoundError(
                f"{folder}: no moving average was saved; average=ema cannot start in the middle of a run."
            )
        module = self.averaged.module
        updates = read_record(folder / RECORD, MovingAverageFile)["updates"]
        saved = load_model(folder, type(module), dtype=module.dtype)
        with torch.no_grad():
            for averaged, weight in zip(module.parameters(), saved.parameters()):
                averaged.copy_(weight)
        self.averaged.n_averaged.fill_(updates)


@contextlib.contextmanager
def mean_swapped_in(model: PreTrainedModel, checkpoints: list[Path]) -> Iterator[None]:
    """Give the model the mean of its own and the checkpoints' weights inside the context; restore its own exactly."""
    weights = list(model.parameters())
    own = [weight.data for weight in weights]
    sums = [weight.to("cpu", torch.float64, copy=True) for weight in own]
    for folder in checkpoints:
        for total, weight in zip(sums, load_model(folder, type(model), dtype=torch.float32).parameters()):
            total += weight.detach()
    try:
        for weight, total in zip(weights, sums):
            weight.data = (total / (len(checkpoints) + 1)).to(weight)
        yield
    finally:
        for weight, data in zip(weights, own):
            weight.data = data


def checkpoints_to_average(
    args: VaswaniTrainingArguments, state: TrainerState, saved_steps: list[int], run: str | Path
) -> list[Path]:
    """Checkpoints for the average, at most `average_count`: best first for `best`, oldest first for `last`.

    Args:
        args, state: Arguments and state of the Trainer.
        saved_steps (`list[int]`): Steps of the run's regular checkpoints, those of interruptions excluded.
        run (`str` or `Path`): Folder of the run.
    """
    folders = checkpoint_folders(run)
    if args.average == "last":
        return [folder for folder in folders if checkpoint_step(folder) in saved_steps[-args.average_count :]]
    if args.average != "best":
        return []
    values = metric_by_step(state, args.best_metric)
    scored = [folder for folder in folders if checkpoint_step(folder) in values]
    scored.sort(key=lambda folder: values[checkpoint_step(folder)], reverse=bool(args.greater_is_better))
    return scored[: args.average_count]


def metric_by_step(state: TrainerState, metric: str) -> dict[int, float]:
    """Values of an evaluation metric by step."""
    return {entry["step"]: entry[metric] for entry in state.log_history if metric in entry}


def write_average(trainer) -> Path:
    """Write a run's `average` as the checkpoint `average-last`, `average-best` or `average-ema` in its folder.

    Args:
        trainer (`VaswaniTrainer`): Trainer after training.
    """
    args, state = trainer.args, trainer.state
    output = Path(args.output_dir) / f"average-{args.average}"
    if args.average == "ema":
        trainer.moving_average.save(output, trainer.processing_class, replace=True)
        return output
    checkpoints = checkpoints_to_average(args, state, trainer.saved_steps, args.output_dir)
    if len(checkpoints) < args.average_count:
        logger.warning("%s: expected %d checkpoints, found %d.", output, args.average_count, len(checkpoints))
    values = metric_by_step(state, args.best_metric) if args.average == "best" else {}
    scores = {args.best_metric: [values[checkpoint_step(folder)] for folder in checkpoints]} if values else {}
    average(checkpoints, str(output), scores, replace=True)
    return output
