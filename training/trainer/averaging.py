"""Averages of weights (section 6.1): of checkpoints afterwards, of a run's last or best, or a moving one."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import TrainerState

from hf_vaswani import VaswaniForConditionalGeneration

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
    sync,
)


logger = logging.getLogger(__name__)


RECORD = "averaged_from.json"
LEFTOVERS = ("partial", "earlier")  # endings of folders beside an average, while it is written


def last_checkpoints(run: str, count: int) -> list[Path]:
    """The last checkpoints that a run wrote in its own time, oldest first: not one that an interruption wrote in
    between, nor one that was kept for being the best, in the place of one that is gone.

    Raises:
        ValueError: There are not so many.
    """
    complete = complete_checkpoints(run)
    steps = regular_steps(complete[-1])[-count:] if complete else []
    if len(steps) < count:
        raise ValueError(f"{run}: asked for the last {count} checkpoints, and it has written {len(steps)}.")
    checkpoints = [Path(run) / checkpoint_name(step) for step in steps]
    if missing := [folder.name for folder in checkpoints if folder not in complete]:
        raise ValueError(
            f"{run}: of the last {count} checkpoints, these are gone: {', '.join(missing)}. "
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
        output (`str`): Folder to write. It appears only when it is complete, and lists in `averaged_from.json` what
            went into it.
        notes (`dict`, *optional*): To be added there.
        replace (`bool`): Whether an average that is there already gives way.
        trust_remote_code (`bool`): As of `load_tokenizer`.

    Raises:
        ValueError: No checkpoints, adapters, configurations that differ, or what `load_model` refuses.
        FileExistsError: `output` is there already.
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
        for name, weight in model.named_parameters():  # a tied matrix comes once
            sums[name] = sums.get(name, 0) + weight.detach().double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(sums[name] / len(checkpoints))

    record = {"method": "mean of the weights", "checkpoints": [str(folder) for folder in checkpoints], **(notes or {})}
    write_checkpoint(model, load_tokenizer(checkpoints[-1], trust_remote_code), Path(output), record, replace)


def check_output(output: Path, replace: bool) -> None:
    """Raises FileExistsError where there is something that may not be replaced: only an average may."""
    if os.path.lexists(output) and not (replace and (output / RECORD).is_file() and not output.is_symlink()):
        raise FileExistsError(f"{output} is there already.")
    for place in (output.with_name(f"{output.name}.{name}") for name in LEFTOVERS):
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise FileExistsError(f"{place} is in the way: expected an earlier run's folder, or nothing.")


def write_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path, record: dict, replace: bool = False
) -> None:
    """Writes an ordinary checkpoint folder, with the record of what was averaged; it appears when it is complete.

    Args:
        model (`PreTrainedModel`): With the averaged weights.
        tokenizer (`PreTrainedTokenizerBase`): To go with it.
        output (`Path`): Folder to write.
        record (`dict`): For `averaged_from.json`.
        replace (`bool`): Whether an average that is there already gives way.

    Raises:
        FileExistsError: `output` is there already, or something in the place of the folder it grows in.
        OSError: It cannot be written.
    """
    check_output(output, replace)
    partial, earlier = (output.with_name(f"{output.name}.{name}") for name in LEFTOVERS)
    for leftover in (partial, earlier):
        shutil.rmtree(leftover, ignore_errors=True)  # which leaves a file and a symbolic link
    output.parent.mkdir(parents=True, exist_ok=True)
    what = f"{output.name} could not be written"
    with naming_what_failed(output.parent, what, lambda: shutil.rmtree(partial, ignore_errors=True)):
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        sync(partial)
    if output.exists():
        output.rename(earlier)
    partial.rename(output)
    shutil.rmtree(earlier, ignore_errors=True)


EMA_NAME = "ema"  # folder in each checkpoint


class AverageFile(TypedDict):
    """What is used of `averaged_from.json`."""

    checkpoints: NotRequired[list[str]]
    updates: NotRequired[int]


class MovingAverageFile(TypedDict):
    """The same, of a moving average."""

    updates: int


class MovingAverage(TrainerCallback):
    """The exponential moving average of the weights: those after the first update, then after each update
    `decay * average + (1 - decay) * weights`.

    Args:
        model (`PreTrainedModel`): Whose weights to average; the average lies on the same device, in the same type.
        decay (`float`): Of what was averaged before.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.averaged.update_parameters(model)

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """The model has the averaged weights within, and its own afterwards: storage changes hands, nothing is
        computed."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def _swap(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.averaged.module.parameters(), model.parameters()):
            mine.data, theirs.data = theirs.data, mine.data

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, replace: bool = False) -> None:
        """Writes the average as an ordinary checkpoint."""
        updates = int(self.averaged.n_averaged)
        record = {"method": "exponential moving average of the weights", "decay": self.decay, "updates": updates}
        write_checkpoint(self.averaged.module, tokenizer, folder, record, replace)

    def load(self, folder: Path) -> None:
        """Goes on from an average that was saved.

        Raises:
            FileNotFoundError: There is none.
        """
        if not (folder / RECORD).is_file():
            raise FileNotFoundError(f"{folder}: no moving average was kept; it cannot begin in the middle of a run.")
        module = self.averaged.module
        updates = read_record(folder / RECORD, MovingAverageFile)["updates"]
        saved = load_model(folder, type(module), dtype=module.dtype)
        with torch.no_grad():
            for mine, theirs in zip(module.parameters(), saved.parameters()):
                mine.copy_(theirs)
        self.averaged.n_averaged.fill_(updates)


@contextlib.contextmanager
def mean_swapped_in(model: PreTrainedModel, checkpoints: list[Path]) -> Iterator[None]:
    """Within, the model has the mean of its own weights and those of checkpoints; afterwards its own, to the bit."""
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
    """The checkpoints that `average` asks for, the best or oldest first: `average_count`, or as many as there are.

    Args:
        args, state: Of the Trainer.
        saved_steps (`list[int]`): When the run wrote checkpoints, but for those of an interruption.
        run (`str` or `Path`): Its folder.
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
    """The values of a metric of evaluation, by the step they were found at."""
    return {entry["step"]: entry[metric] for entry in state.log_history if metric in entry}


def write_average(trainer) -> Path:
    """Writes what a run's `average` asks for, as the checkpoint `average-last`, `-best` or `-ema` in its folder.

    Args:
        trainer (`VaswaniTrainer`): After its training.
    """
    args, state = trainer.args, trainer.state
    output = Path(args.output_dir) / f"average-{args.average}"
    if args.average == "ema":
        trainer.moving_average.save(output, trainer.processing_class, replace=True)
        return output
    checkpoints = checkpoints_to_average(args, state, trainer.saved_steps, args.output_dir)
    if len(checkpoints) < args.average_count:
        logger.warning("%s: of %d checkpoints, there are %d.", output, args.average_count, len(checkpoints))
    values = metric_by_step(state, args.best_metric) if args.average == "best" else {}
    scores = {args.best_metric: [values[checkpoint_step(folder)] for folder in checkpoints]} if values else {}
    average(checkpoints, str(output), scores, replace=True)
    return output
