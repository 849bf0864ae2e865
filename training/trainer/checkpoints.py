"""Checkpoint folders that are there whole or not at all, whenever a run is killed.

A checkpoint is written to `checkpoint.partial/` in the run's folder, brought to the disk, and renamed to its place.
What is no longer wanted is renamed back there before it is deleted, so that no `checkpoint-STEP` is ever half there.
Every file of it has its checksum in `training_checksums.json`: what was damaged later is found before it is used.
"""

import contextlib
import json
import logging
import os
import reprlib
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_vaswani import check_weights
from hf_vaswani.checksums_vaswani import CHECKSUMS_NAME, checksum, read_checksums

from ..json_records import read_record


logger = logging.getLogger(__name__)


PARTIAL = "checkpoint.partial"  # not "checkpoint-", which the library would take for a checkpoint
REPLACED, REMOVED = "replaced", "removed"
STATE_NAME = "trainer_state.json"
PROGRESS_NAME = "progress.json"
TRAINING_CHECKSUMS_NAME = "training_checksums.json"
# What is drawn, and what the card counts with, of the log in `trainer_state.json`.
NUMBERS = {
    *("loss", "learning_rate", "eval_loss", "eval_perplexity", "eval_bleu", "eval_runtime", "train_loss"),
    *("train_runtime", "train_steps_per_second", "target_tokens_per_second", "padding_share"),
}


class StateFile(TypedDict):
    """What is used of `trainer_state.json`."""

    log_history: NotRequired[list[dict[str, Any]]]
    global_step: NotRequired[int]
    epoch: NotRequired[int | float | None]
    max_steps: NotRequired[int]
    save_steps: NotRequired[int | float]
    best_global_step: NotRequired[int | None]
    best_model_checkpoint: NotRequired[str | None]
    num_input_tokens_seen: NotRequired[int]
    total_flos: NotRequired[int | float]
    stateful_callbacks: NotRequired[dict[str, Any]]


class StepsFile(TypedDict):
    """What `progress.json` says of the run's checkpoints."""

    saved_steps: NotRequired[list[int]]


class ProgressFile(StepsFile):
    """What it holds for the run to go on."""

    total_loss: int | float
    last_logged: int
    processes: list[dict[str, Any]]


def read_state(folder: Path) -> dict:
    """The Trainer's state in the folder of a run or of a checkpoint.

    Raises:
        ValueError: It is broken; the message names file and field.
        OSError: It cannot be read.
    """
    path = folder / STATE_NAME
    state = read_record(path, StateFile)
    for index, entry in enumerate(state.get("log_history", [])):
        for name in ("step", *(name for name in entry if name in NUMBERS)):
            if not isinstance(entry.get(name), int if name == "step" else (int, float)):
                found = reprlib.repr(entry.get(name))
                raise ValueError(f"{path}: log_history[{index}]: {name}: expected a number, found {found:.60}.")
    return state


def read_progress(checkpoint: Path, schema: type[dict] = ProgressFile) -> dict | None:
    """What a checkpoint holds beside the stock Trainer's; `None` for one of a stock Trainer.

    Args:
        checkpoint (`Path`): Its folder.
        schema (`type`): What is asked of it.

    Raises:
        OSError: It is damaged; the message says what can be done.
    """
    path = checkpoint / PROGRESS_NAME
    if not path.is_file():
        return None
    try:
        progress = read_record(path, schema)
        if schema is ProgressFile and not (progress["processes"] and all(map(_numbers, progress["processes"]))):
            raise ValueError("processes: expected a list of objects with numbers.")
    except ValueError as error:
        raise OSError(f"{path} is damaged: {error} {_without(checkpoint)}") from error
    return progress


def _numbers(counted: dict) -> bool:
    return all(isinstance(value, (int, float)) for value in counted.values())


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint that is written after optimiser step `step`."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(folder: Path) -> int:
    """The optimiser step that a folder `checkpoint-STEP` was written after."""
    return int(folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def checkpoint_folders(run: str | Path) -> list[Path]:
    """The folders `checkpoint-STEP` of a run, oldest first."""
    folders = Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((folder for folder in folders if folder.name.split("-", 1)[1].isdigit()), key=checkpoint_step)


def complete_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in a run's folder that were written to their end, oldest first.

    The Trainer writes `trainer_state.json` last: where it is missing or cut off, the checkpoint is passed over with a
    warning.
    """
    complete = []
    for folder in checkpoint_folders(run):
        try:
            read_record(folder / STATE_NAME)
            complete.append(folder)
        except (FileNotFoundError, ValueError):
            logger.warning("%s was not written to its end; it is passed over.", folder)
    return complete


def regular_steps(checkpoint: Path) -> list[int]:
    """The steps at which a run wrote checkpoints, up to this one, oldest first, whether they are still there or not;
    without those that an interruption wrote in between. Where the run did not note them, its `save_steps` tells.

    Raises:
        OSError: What it noted is damaged.
        ValueError: The Trainer's state is.
    """
    noted = read_progress(checkpoint, StepsFile) or {}
    if "saved_steps" in noted:
        return noted["saved_steps"]
    state, step = read_state(checkpoint), checkpoint_step(checkpoint)
    every = int(state.get("save_steps", 0))
    steps = list(range(every, step + 1, every)) if every > 0 else []
    return steps if step != state.get("max_steps") or step in steps else [*steps, step]


def write_checksums(checkpoint: Path) -> None:
    """Notes size and SHA-256 of every file of a checkpoint; those of weights have been computed already."""
    known = {
        place.parent / name: entry
        for place in checkpoint.rglob(CHECKSUMS_NAME)
        for name, entry in read_checksums(place.parent).items()
    }
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    checksums = {path.relative_to(checkpoint).as_posix(): known.get(path) or checksum(path) for path in files}
    text = json.dumps(checksums, indent=2) + "\n"
    (checkpoint / TRAINING_CHECKSUMS_NAME).write_text(text, encoding="utf-8")


def check_files(checkpoint: Path) -> None:
    """Compares every file of a checkpoint with what was written, if that was noted.

    Raises:
        OSError: A file is damaged or missing; the message says what can be done.
    """
    saved = read_checksums(checkpoint, TRAINING_CHECKSUMS_NAME)
    if saved is None:
        logger.warning("%s has no %s: only its weights are checked.", checkpoint, TRAINING_CHECKSUMS_NAME)
        check_weights(checkpoint)
        return
    for name, expected in saved.items():
        path = checkpoint / name
        if not path.is_file():
            raise OSError(f"{path} is missing. {_without(checkpoint)}")
        size = path.stat().st_size
        if size != expected["size"]:
            raise OSError(f"{path} is damaged: it has {size:,} bytes of {expected['size']:,}. {_without(checkpoint)}")
        if (found := checksum(path)["sha256"]) != expected["sha256"]:
            raise OSError(
                f"{path} is damaged: its SHA-256 is {found}, and {TRAINING_CHECKSUMS_NAME} says {expected['sha256']}. "
                f"{_without(checkpoint)}"
            )


def _without(checkpoint: Path) -> str:
    """What can be done without a checkpoint."""
    folders = complete_checkpoints(checkpoint.parent)
    earlier = [folder for folder in folders if checkpoint_step(folder) < checkpoint_step(checkpoint)]
    if not earlier:
        return "There is no earlier checkpoint to go on from: start anew in another folder."
    return f"Remove {checkpoint} to go on from {earlier[-1].name}."


@contextlib.contextmanager
def naming_what_failed(place: Path, what: str, then: Callable[[], str | None]) -> Iterator[None]:
    """Raises OSError for whatever way a library has to say that it could not write.

    Args:
        place (`Path`): Folder that is written to.
        what (`str`): What could not be done, for the message.
        then (`Callable`): Cleans up; what it returns ends the message.
    """
    try:
        yield
    except Exception as error:
        # What tokenizers raises is a bare Exception.
        if not isinstance(error, (OSError, RuntimeError, SafetensorError)) and type(error) is not Exception:
            raise
        free = shutil.disk_usage(place).free  # PyTorch's error says nothing of a full disk
        message = f"{place}: {what}, with {free:,} bytes free there: {error}. {then() or ''}"
        raise OSError(message.strip()) from error


def sync(folder: Path) -> None:
    """Brings a folder, with all that is in it, to the disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(folder: Path, place: Path) -> None:
    """Renames a folder that was written under `checkpoint.partial` to its place, where it is then whole.

    An earlier folder of that name is set aside, not deleted, before the new one is there; `clear_partial` puts it back
    if the process ends between the two.
    """
    sync(folder)
    aside = place.parent / PARTIAL / REPLACED
    if place.exists():
        aside.mkdir(parents=True, exist_ok=True)
        place.rename(aside / place.name)
    folder.rename(place)
    _sync_entries(place.parent)
    shutil.rmtree(place.parent / PARTIAL, ignore_errors=True)


def put_files_in_place(folder: Path, place: Path) -> None:
    """Moves every file of a folder to the folder `place`, each over the earlier one of its name."""
    sync(folder)
    for path in sorted(folder.iterdir()):
        path.replace(place / path.name)
    folder.rmdir()
    _sync_entries(place)


def _sync_entries(folder: Path) -> None:
    """Brings the names in a folder to the disk, not what is behind them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_partial(run: str | Path) -> None:
    """Deletes what a killed run left half written or half deleted, and puts back what it was about to replace."""
    partial = Path(run) / PARTIAL
    for earlier in (partial / REPLACED).glob("*"):
        if not (Path(run) / earlier.name).exists():
            earlier.rename(Path(run) / earlier.name)
    shutil.rmtree(partial, ignore_errors=True)


def rotate(run: Path, limit: int | None, keep: set[Path], regular: Collection[int]) -> None:
    """Deletes checkpoints until there are no more than `limit`, but none of those to keep: first what interruptions
    wrote, then the oldest.

    Args:
        run (`Path`): The run's folder.
        limit (`int`, *optional*): `save_total_limit`; no limit when not given, or not positive.
        keep (`set[Path]`): Checkpoints to keep, even over the limit.
        regular (`Collection[int]`): Steps of the checkpoints that no interruption wrote.
    """
    if limit is None or limit <= 0:
        return
    folders = checkpoint_folders(run)
    surplus = len(folders) - max(limit, len(keep))
    removed = run / PARTIAL / REMOVED
    candidates = [folder for folder in folders if folder not in keep]
    candidates.sort(key=lambda folder: (checkpoint_step(folder) in regular, checkpoint_step(folder)))
    for folder in candidates[: max(surplus, 0)]:
        removed.mkdir(parents=True, exist_ok=True)
        folder.rename(removed / folder.name)
    shutil.rmtree(run / PARTIAL, ignore_errors=True)
