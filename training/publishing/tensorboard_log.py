"""TensorBoard event files of a run, with all but the scalars removed for privacy."""

import io
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter


NAME = "runs/events.out.tfevents"  # followed by a number; TensorBoard's own names contain the host name


def event_files(run: Path) -> list[Path]:
    """Event files in a run's folder, one for each start of the run, oldest first."""
    return sorted(run.glob("runs/*/events.out.tfevents.*"), key=lambda path: path.name)  # sorted by time


def scalars(paths: list[Path], last_step: int) -> dict[str, bytes]:
    """Copy the scalars of event files; the originals also contain the Trainer's arguments, paths included.

    Args:
        paths (`list[Path]`): Event files.
        last_step (`int`): Step of the published weights; later scalars are omitted.

    Returns:
        `dict[str, bytes]`: Content by name; files without scalars are omitted.
    """
    contents = (content for path in paths if (content := _scalars(path, last_step)))
    return {f"{NAME}.{number}": content for number, content in enumerate(contents)}


def _scalars(path: Path, last_step: int) -> bytes | None:
    buffer, count = io.BytesIO(), 0
    writer = RecordWriter(buffer)
    for event in LegacyEventFileLoader(str(path)).Load():
        values = event.summary.value
        is_scalar = len(values) > 0 and all(value.WhichOneof("value") == "simple_value" for value in values)
        if event.WhichOneof("what") == "file_version" or (is_scalar and event.step <= last_step):
            writer.write(event.SerializeToString())
            count += is_scalar
    return buffer.getvalue() if count else None
