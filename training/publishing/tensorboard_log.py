"""TensorBoard's files of a run, without what says whose machine it was."""

import io
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter


NAME = "runs/events.out.tfevents"  # and a number; TensorBoard's own names contain the host's


def event_files(run: Path) -> list[Path]:
    """The event files in a run's folder, one for each of its starts, oldest first."""
    return sorted(run.glob("runs/*/events.out.tfevents.*"), key=lambda path: path.name)  # it begins with the time


def scalars(paths: list[Path], last_step: int) -> dict[str, bytes]:
    """Event files with the scalars alone, as the Trainer writes its arguments there too, paths and all.

    Args:
        paths (`list[Path]`): Event files.
        last_step (`int`): What was logged later is of other weights.

    Returns:
        `dict[str, bytes]`: Content by name; files without scalars are left out.
    """
    found = (content for path in paths if (content := _scalars(path, last_step)))
    return {f"{NAME}.{number}": content for number, content in enumerate(found)}


def _scalars(path: Path, last_step: int) -> bytes | None:
    written, count = io.BytesIO(), 0
    writer = RecordWriter(written)
    for event in LegacyEventFileLoader(str(path)).Load():
        values = event.summary.value
        is_scalar = len(values) > 0 and all(value.WhichOneof("value") == "simple_value" for value in values)
        if event.WhichOneof("what") == "file_version" or (is_scalar and event.step <= last_step):
            writer.write(event.SerializeToString())
            count += is_scalar
    return written.getvalue() if count else None
