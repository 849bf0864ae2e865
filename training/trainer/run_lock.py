"""A run's folder belongs to one process at a time."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


LOCK_NAME = "run.lock"


class RunInUseError(BlockingIOError):
    """Another process is at work in a run's folder."""


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Keeps a run's folder to this process, which may ask for it again meanwhile.

    The operating system releases the lock when the process ends, in whatever way. The file `run.lock` stays; it says
    who was the last to hold it.

    Args:
        run (`Path`): Folder of a run; made if it is not there.

    Raises:
        RunInUseError: Another process has it; the message says which.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / LOCK_NAME, blocking=False, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        holder = (run / LOCK_NAME).read_text(encoding="utf-8", errors="replace").strip() or "unknown"
        raise RunInUseError(f"{run}: another run is at work here, process {holder}.") from None
    try:
        (run / LOCK_NAME).write_text(f"{os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()
