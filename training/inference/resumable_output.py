"""Output file of a translation that can be resumed after an interruption."""

import hashlib
import json
import os
from pathlib import Path

from filelock import FileLock, Timeout


class PartialOutput:
    """A file of translations that grows beside its final place, and can be gone on with after an interruption.

    Args:
        output (`str`): File to write. It appears when everything is translated; until then its lines are in
            `output.partial`, and what they were made from in `output.partial.json`. `output.partial.lock` keeps a
            second run from writing there too.
        job (`dict`): What the translations depend on.
        resume (`bool`): Go on with a partial file.
        group (`int`): Lines of a sentence. Of a partial file, only whole groups are kept.

    Attributes:
        lines (`int`), sentences (`int`): What is there already, once the file is entered as a context.

    Raises:
        FileExistsError: There is a partial file, and it is not to be gone on with.
        FileNotFoundError: There is none to go on with.
        ValueError: It was made from something else.
        BlockingIOError: When it is entered: another run is writing it.
    """

    def __init__(self, output: str, job: dict, resume: bool, group: int = 1):
        self.output, self.partial, self.record = (
            Path(output),
            Path(f"{output}.partial"),
            Path(f"{output}.partial.json"),
        )
        self.job, self.resume, self.group = job, resume, group
        self.lock = FileLock(f"{output}.partial.lock", blocking=False)
        self.lines = self.sentences = 0
        if resume:
            self._check(job)
        elif self.partial.exists():
            raise FileExistsError(
                f"{self.partial} holds an earlier run: pass --resume to go on with it, or delete it to start anew."
            )

    def _check(self, job: dict) -> None:
        if not (self.partial.is_file() and self.record.is_file()):
            raise FileNotFoundError(f"--resume: there is no {self.partial} to go on with.")
        earlier = json.loads(self.record.read_text(encoding="utf-8"))
        if changed := [
            f"{name} ({earlier.get(name)!r}, now {job[name]!r})" for name in job if earlier.get(name) != job[name]
        ]:
            raise ValueError(f"--resume: {self.partial} is of another run: {', '.join(changed)}.")

    def __enter__(self) -> "PartialOutput":
        try:
            self.lock.acquire()
        except Timeout:
            raise BlockingIOError(f"{self.partial}: another run is writing it.") from None
        if self.resume:
            self._drop_incomplete()
            self.sentences = self.lines // self.group
        else:
            self.record.write_text(json.dumps(self.job, indent=2) + "\n", encoding="utf-8")
        self.file = open(self.partial, "a", encoding="utf-8", newline="\n")
        return self

    def _drop_incomplete(self) -> None:
        """Cut off the last group, if it lacks lines, or the end of one."""
        end = size = lines = 0
        with open(self.partial, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                lines, size = lines + 1, size + len(line)
                if lines % self.group == 0:
                    self.lines, end = lines, size
        os.truncate(self.partial, end)

    def write(self, text: str) -> None:
        self.file.write(text)

    def flush(self) -> None:
        self.file.flush()

    def __exit__(self, kind, *_) -> None:
        self.file.close()
        if kind is None:
            self.partial.replace(self.output)
            self.record.unlink()
        self.lock.release()
        Path(self.lock.lock_file).unlink(missing_ok=True)


def fingerprint(file: str) -> str:
    """Size and beginning of a file, which tell whether it is still the same."""
    with open(file, "rb") as stream:
        beginning = hashlib.sha256(stream.read(2**20)).hexdigest()
    return f"{Path(file).stat().st_size} bytes, {beginning[:16]}"
