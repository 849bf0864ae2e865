"""Translations that are killed, in processes of their own, or interrupted while they write."""

import contextlib
import os
import signal

import pytest

from training.cli import main
from training.inference.resumable_output import PartialOutput


def kill_after_ten_lines() -> None:
    """Let this process kill itself when ten translations and a half are written."""
    write, written = PartialOutput.write, []

    def write_ten(self, text):
        if len(written) == 10:
            self.file.write(b"half a li")
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(text)
        write(self, text)

    PartialOutput.write = write_ten


def killed_after_ten_lines(words: list[str]) -> None:
    """Run a command that kills its process."""
    kill_after_ten_lines()
    main(words)


@contextlib.contextmanager
def interrupted_after(sentences: int):
    """Writing fails then, in the middle of the next sentence: of an n-best list, behind its first line."""
    write, written = PartialOutput.write, []

    def fail(self, text):
        if len(written) == sentences:
            write(self, text[: -len(text) // 3])
            raise RuntimeError("interrupted")
        written.append(text)
        write(self, text)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
        patch.setattr(PartialOutput, "write", fail)
        yield
