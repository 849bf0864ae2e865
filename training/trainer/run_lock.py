"""Lock of a run's folder: one process at a time works in it."""

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
    """Lock a run's folder for this process. The lock is reentrant.

    The operating system releases the lock when the process ends, however it ends. The file `run.lock` remains, and
    names the process that last held the lock.

    Args:
        run (`Path`): Folder of the run, created if missing.

    Raises:
        RunInUseError: Another process holds the lock. The message names it.
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
