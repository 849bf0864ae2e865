"""Checkpoint folders that are there whole or not at all, whenever a run is killed.

A checkpoint is written to `checkpoint.partial/` in the run's folder, brought to the disk, and renamed to its place.
What is no longer wanted is renamed back there before it is deleted, so that no `checkpoint-STEP` is ever half there.
"""

import json
import logging
import os
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


logger = logging.getLogger(__name__)

PARTIAL = "checkpoint.partial"  # not "checkpoint-", which the library would take for a checkpoint
REPLACED, REMOVED = "replaced", "removed"
STATE_NAME = "trainer_state.json"


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
            json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
            complete.append(folder)
        except (FileNotFoundError, ValueError):
            logger.warning("%s was not written to its end; it is passed over.", folder)
    return complete


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


def rotate(run: Path, limit: int | None, keep: set[Path]) -> None:
    """Deletes the oldest checkpoints until there are no more than `limit`, but none of those to keep.

    Args:
        run (`Path`): The run's folder.
        limit (`int`, *optional*): `save_total_limit`; no limit when not given, or not positive.
        keep (`set[Path]`): Checkpoints to keep, even over the limit.
    """
    if limit is None or limit <= 0:
        return
    folders = checkpoint_folders(run)
    surplus = len(folders) - max(limit, len(keep))
    removed = run / PARTIAL / REMOVED
    for folder in [folder for folder in folders if folder not in keep][: max(surplus, 0)]:
        removed.mkdir(parents=True, exist_ok=True)
        folder.rename(removed / folder.name)
    shutil.rmtree(run / PARTIAL, ignore_errors=True)
