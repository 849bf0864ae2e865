"""Atomic, checksummed checkpoint folders.

A checkpoint is written to `checkpoint.partial/` in the run's folder, synced to disk, and renamed to
`checkpoint-STEP`. Rotation moves a checkpoint back to `checkpoint.partial/` before deleting it, so a killed run never
leaves an incomplete `checkpoint-STEP`. `training_checksums.json` holds the checksum of every file; damage is detected
before a file is read.
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

from ..files import sync
from ..json_records import read_record


logger = logging.getLogger(__name__)


PARTIAL = "checkpoint.partial"  # not "checkpoint-", which the library would take for a checkpoint
REPLACED, REMOVED = "replaced", "removed"
STATE_NAME = "trainer_state.json"
PROGRESS_NAME = "progress.json"
TRAINING_CHECKSUMS_NAME = "training_checksums.json"
# Numeric fields in the log of `trainer_state.json` that the curves and the model card use.
NUMBERS = {
    *("loss", "learning_rate", "eval_loss", "eval_perplexity", "eval_bleu", "eval_f1", "eval_runtime", "train_loss"),
    *("train_runtime", "train_steps_per_second", "target_tokens_per_second", "padding_share"),
}


class StateFile(TypedDict):
    """Fields of `trainer_state.json`."""

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
    """Regular checkpoints of the run, in `progress.json`."""

    saved_steps: NotRequired[list[int]]


class ProgressFile(StepsFile):
    """Fields of `progress.json` for exact resumption."""

    total_loss: int | float
    last_logged: int
    processes: list[dict[str, Any]]


def read_state(folder: Path) -> dict:
    """Read the Trainer's state from the folder of a run or of a checkpoint.

    Raises:
        ValueError: The state is malformed; the message names file and field.
        OSError: The file cannot be read.
    """
    path = folder / STATE_NAME
    state = read_record(path, StateFile)
    for index, entry in enumerate(state.get("log_history", [])):
        for name in ("step", *(name for name in entry if name in NUMBERS)):
            if not isinstance(entry.get(name), int if name == "step" else (int, float)):
                value = reprlib.repr(entry.get(name))
                raise ValueError(f"{path}: log_history[{index}]: {name}: expected a number, found {value:.60}.")
    return state


def read_progress(checkpoint: Path, schema: type[dict] = ProgressFile) -> dict | None:
    """Read `progress.json` of a checkpoint; `None` for a checkpoint of a stock Trainer.

    Args:
        checkpoint (`Path`): Folder of the checkpoint.
        schema (`type`): `TypedDict` with the required fields.

    Raises:
        OSError: The file is damaged; the message suggests a remedy.
    """
    path = checkpoint / PROGRESS_NAME
    if not path.is_file():
        return None
    try:
        progress = read_record(path, schema)
        if schema is ProgressFile and not (progress["processes"] and all(map(_numbers, progress["processes"]))):
            raise ValueError("processes: expected a list of objects with numbers.")
    except ValueError as error:
        raise OSError(f"{path} is damaged: {error} {_remedy(checkpoint)}") from error
    return progress


def _numbers(counts: dict) -> bool:
    return all(isinstance(value, (int, float)) for value in counts.values())


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after optimiser step `step`."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(folder: Path) -> int:
    """Optimiser step of a folder `checkpoint-STEP`."""
    return int(folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def checkpoint_folders(run: str | Path) -> list[Path]:
    """Folders `checkpoint-STEP` of a run, oldest first."""
    folders = Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((folder for folder in folders if folder.name.split("-", 1)[1].isdigit()), key=checkpoint_step)


def complete_checkpoints(run: str | Path) -> list[Path]:
    """Complete checkpoints in a run's folder, oldest first.

    The Trainer writes `trainer_state.json` last. A checkpoint without it, or with a truncated one, is skipped with a
    warning.
    """
    complete = []
    for folder in checkpoint_folders(run):
        try:
            read_record(folder / STATE_NAME)
            complete.append(folder)
        except (FileNotFoundError, ValueError):
            logger.warning("%s is incomplete: it is skipped.", folder)
    return complete


def regular_steps(checkpoint: Path) -> list[int]:
    """Steps of a run's regular checkpoints up to this one, oldest first, deleted checkpoints included.

    Checkpoints written on an interruption are excluded. For a run without records, the steps follow from its
    `save_steps`.

    Raises:
        OSError: `progress.json` is damaged.
        ValueError: The Trainer's state is malformed.
    """
    progress = read_progress(checkpoint, StepsFile) or {}
    if "saved_steps" in progress:
        return progress["saved_steps"]
    state, step = read_state(checkpoint), checkpoint_step(checkpoint)
    interval = int(state.get("save_steps", 0))
    steps = list(range(interval, step + 1, interval)) if interval > 0 else []
    return steps if step != state.get("max_steps") or step in steps else [*steps, step]


def write_checksums(checkpoint: Path) -> None:
    """Write size and SHA-256 of every file of a checkpoint, reusing the recorded checksums of the weights."""
    recorded = {
        record.parent / name: entry
        for record in checkpoint.rglob(CHECKSUMS_NAME)
        for name, entry in read_checksums(record.parent).items()
    }
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    checksums = {path.relative_to(checkpoint).as_posix(): recorded.get(path) or checksum(path) for path in files}
    text = json.dumps(checksums, indent=2) + "\n"
    (checkpoint / TRAINING_CHECKSUMS_NAME).write_text(text, encoding="utf-8")


def check_files(checkpoint: Path) -> None:
    """Verify every file of a checkpoint against its checksums; without `training_checksums.json`, the weights only.

    Raises:
        OSError: A file is damaged or missing; the message suggests a remedy.
    """
    saved = read_checksums(checkpoint, TRAINING_CHECKSUMS_NAME)
    if saved is None:
        logger.warning("%s has no %s: only its weights are checked.", checkpoint, TRAINING_CHECKSUMS_NAME)
        check_weights(checkpoint)
        return
    for name, expected in saved.items():
        path = checkpoint / name
        if not path.is_file():
            raise OSError(f"{path} is missing. {_remedy(checkpoint)}")
        size = path.stat().st_size
        if size != expected["size"]:
            raise OSError(f"{path} is damaged: it has {size:,} bytes of {expected['size']:,}. {_remedy(checkpoint)}")
        if (digest := checksum(path)["sha256"]) != expected["sha256"]:
            raise OSError(
                f"{path} is damaged: its SHA-256 is {digest}, but {TRAINING_CHECKSUMS_NAME} has {expected['sha256']}. "
                f"{_remedy(checkpoint)}"
            )


def _remedy(checkpoint: Path) -> str:
    """Advice for a run whose last checkpoint is damaged."""
    folders = complete_checkpoints(checkpoint.parent)
    earlier = [folder for folder in folders if checkpoint_step(folder) < checkpoint_step(checkpoint)]
    if not earlier:
        return "There is no earlier checkpoint to resume from: start a new run in another folder."
    return f"Remove {checkpoint} to resume from {earlier[-1].name}."


@contextlib.contextmanager
def naming_what_failed(place: Path, what: str, then: Callable[[], str | None]) -> Iterator[None]:
    """Convert the write errors of all libraries to OSError.

    Args:
        place (`Path`): Folder that is written to.
        what (`str`): Failed operation, for the message.
        then (`Callable`): Cleans up, and returns the end of the message.
    """
    try:
        yield
    except Exception as error:
        # tokenizers raises a bare Exception.
        if not isinstance(error, (OSError, RuntimeError, SafetensorError)) and type(error) is not Exception:
            raise
        free = shutil.disk_usage(place).free  # PyTorch's error does not mention a full disk
        message = f"{place}: {what}, with {free:,} bytes free there: {error}. {then() or ''}"
        raise OSError(message.strip()) from error


def put_in_place(folder: Path, place: Path) -> None:
    """Rename a complete folder from `checkpoint.partial` to its final path.

    An earlier folder of that name is moved aside first. If the process dies between the two renames, `clear_partial`
    restores it.
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
    """Move every file of a folder to the folder `place`, atomically replacing files of the same name."""
    sync(folder)
    for path in sorted(folder.iterdir()):
        path.replace(place / path.name)
    folder.rmdir()
    _sync_entries(place)


def _sync_entries(folder: Path) -> None:
    """Sync a folder's entries to disk, without the content of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_partial(run: str | Path) -> None:
    """Delete a killed run's partially written or deleted folders, and restore those it was about to replace."""
    partial = Path(run) / PARTIAL
    for earlier in (partial / REPLACED).glob("*"):
        if not (Path(run) / earlier.name).exists():
            earlier.rename(Path(run) / earlier.name)
    shutil.rmtree(partial, ignore_errors=True)


def rotate(run: Path, limit: int | None, keep: set[Path], regular: Collection[int]) -> None:
    """Delete surplus checkpoints over `limit`: those of interruptions first, then the oldest.

    Args:
        run (`Path`): Folder of the run.
        limit (`int`, *optional*): `save_total_limit`; no limit when not given or not positive.
        keep (`set[Path]`): Checkpoints to keep, even over the limit.
        regular (`Collection[int]`): Steps of the regular checkpoints, those of interruptions excluded.
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
