"""Outputs for translations: a file that can be resumed after an interruption, or a stream."""

import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from transformers.utils.hub import cached_file

from hf_vaswani.checksums_vaswani import checksum

from ..files import compressed, partial_files, write_whole, written_whole
from .corpus import Line


logger = logging.getLogger(__name__)

VERSION = 2  # format of the record
# Files of a checkpoint that affect its translations.
MODEL_FILES = (
    "model*.safetensors*",
    "config.json",
    "generation_config.json",
    "*tokenizer*",
    "special_tokens_map.json",
)
CHUNK = 2**20  # bytes read at a time


class PartialOutput:
    """Resumable output file of translations, a context manager.

    The output file appears once everything is translated, compressed if its name ends in `.gz`. Until then, the lines
    are in `OUTPUT.partial`, which is locked. The record `OUTPUT.partial.json` stores the job and the number of lines
    in complete windows. `--resume` truncates the partial file to these windows, because the batches of a window depend
    on all of its lines.

    Args:
        output (`str`): File to write.
        job (`dict`): Everything else that the translations depend on: `settings`, and digests of `files`.
        sources (`Iterator[Line]`): All lines of the input. Resuming compares those that are already translated.
        resume (`bool`): Resume a partial file.
        most_lines (`int`, *optional*): Number of lines of the complete output.

    Attributes:
        sentences (`int`): Number of sentences that are already translated, available in the context.

    All errors are raised on entering the context.

    Raises:
        BlockingIOError: Another run is writing the file.
        FileExistsError: There is a partial file, and `resume` is not set.
        FileNotFoundError: There is no partial file to resume.
        ValueError: The partial file belongs to another job or input, or is damaged.
    """

    def __init__(
        self, output: str, job: dict, sources: Iterator[Line], resume: bool = False, most_lines: int | None = None
    ):
        self.output = Path(output)
        self.partial, self.record = partial_files(output)
        self.job, self.sources, self.resume, self.most_lines = job, sources, resume, most_lines
        self.sentences = self.size = 0
        self.input_digest, self.output_digest = hashlib.sha256(), hashlib.sha256()

    @classmethod
    def check(cls, output: str, resume: bool) -> None:
        """Raise the errors of entering the context as early as possible, without taking the lock."""
        partial, record = partial_files(output)
        if not resume and partial.exists():
            raise _partial_exists(partial)
        if resume and not (partial.is_file() and record.is_file()):
            raise _no_partial(partial)

    def __enter__(self) -> "PartialOutput":
        with ExitStack() as stack:
            self.file = stack.enter_context(self._open())
            if self.resume:
                self._restore()
            else:
                self._write_record()
            stack.pop_all()
        return self

    def _open(self) -> BinaryIO:
        """Open and lock the partial file: an existing one to resume, otherwise a new one."""
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open(self.partial, "r+b" if self.resume else "x+b"))
            except FileExistsError:
                raise _partial_exists(self.partial) from None
            except FileNotFoundError:
                if not self.resume:
                    raise
                raise _no_partial(self.partial) from None
            # The creator of the file waits, because other processes lock it briefly to see if it is in use.
            _lock(file, self.partial, wait=not self.resume)
            if not self._is_in_place(file):  # another run has finished it meanwhile, or it is a symbolic link
                raise _no_partial(self.partial) if self.resume else _busy(self.partial)
            stack.pop_all()
        return file

    def _is_in_place(self, file: BinaryIO) -> bool:
        """Return `True` if the partial path still leads to this open file."""
        try:
            status = self.partial.lstat()
        except FileNotFoundError:
            return False
        return S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(file.fileno()))

    def _restore(self) -> None:
        """Check the partial file against its record and the input, and truncate it to complete windows."""
        record = read_record(self.record, self.partial)
        earlier, job = record["job"], json.loads(json.dumps(self.job))
        changed = [
            f"{name} ({then!r}, now {now!r})" for name, then, now in _changes(earlier["settings"], job["settings"])
        ]
        changed += [name for name, _, _ in _changes(earlier["files"], job["files"])]
        if changed:
            raise ValueError(f"--resume: {self.partial} belongs to another run: {', '.join(changed)}.")
        self._check_written(record["done"])
        self._check_sources(record["done"])
        self.file.truncate(self.size)
        self.file.seek(self.size)

    def _check_written(self, done: dict) -> None:
        label = f"--resume: {self.partial}"
        if (size := os.fstat(self.file.fileno()).st_size) < done["bytes"]:
            raise ValueError(
                f"{label} is truncated: found {size} bytes, expected at least the {done['bytes']} of {self.record}."
            )
        lines = 0
        while chunk := self.file.read(min(CHUNK, done["bytes"] - self.size) or CHUNK):
            lines += chunk.count(b"\n")
            if self.size < done["bytes"]:
                self.output_digest.update(chunk)
                self.size += len(chunk)
        if self.output_digest.hexdigest() != done["output"]:
            raise ValueError(f"{label} has changed since it was written: its checksum differs from {self.record}.")
        if self.most_lines is not None and lines > self.most_lines:
            raise ValueError(f"{label} has {lines} lines, but the complete translation has {self.most_lines}.")

    def _check_sources(self, done: dict) -> None:
        label = f"--resume: {self.partial} belongs to another input"
        for line in islice(self.sources, done["sentences"]):
            self._count_source(line)
        if self.sentences < done["sentences"]:
            raise ValueError(
                f"{label}: {done['sentences']} lines are translated, but the input has only {self.sentences}."
            )
        if self.input_digest.hexdigest() != done["input"]:
            raise ValueError(f"{label}: the first {self.sentences} lines, which are translated, have changed.")
        if self.sentences % self.job["settings"]["window"] and next(self.sources, None) is not None:
            raise ValueError(f"{label}: it ended after line {self.sentences} and now has more lines.")

    def _write_record(self) -> None:
        done = {"sentences": self.sentences, "bytes": self.size}
        done |= {"input": self.input_digest.hexdigest(), "output": self.output_digest.hexdigest()}
        write_whole(self.record, json.dumps({"version": VERSION, "job": self.job, "done": done}, indent=2) + "\n")

    def _count_source(self, line: Line) -> None:
        self.input_digest.update(f"{line.text}\n{line.prefix}\n".encode())
        self.sentences += 1

    def write(self, text: str) -> None:
        data = text.encode()
        self.file.write(data)
        self.output_digest.update(data)
        self.size += len(data)

    def end_window(self, lines: Iterable[Line]) -> None:
        """Commit the window of these lines, after all their translations are written. A later interruption does not
        lose them."""
        for line in lines:
            self._count_source(line)
        self._sync()
        self._write_record()

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def __exit__(self, kind, *_) -> None:
        with self.file:  # closing the file releases the lock, so that no other run can resume it before
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        self._sync()
        if not self._is_in_place(self.file):
            raise FileNotFoundError(f"{self.partial} was moved or replaced while it was being written.")
        if self.output.suffix == ".gz":
            self.file.seek(0)
            with written_whole(self.output) as file:
                shutil.copyfileobj(self.file, file)
            self.partial.unlink()
        else:
            self.partial.replace(self.output)
        self.record.unlink()


class DirectOutput:
    """Direct output to standard output, a FIFO or a character device, a context manager.

    Args:
        file (`str`, *optional*): FIFO or device, opened on entering the context; a FIFO blocks until it has a reader.
            The output is compressed if the name ends in `.gz`. Defaults to standard output.
    """

    sentences = 0

    def __init__(self, file: str | None):
        self.name = file

    def __enter__(self) -> "DirectOutput":
        self.stack = ExitStack()
        if self.name is None:
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
            self.file = sys.stdout
            return self
        # Do not create or truncate the file, in case a regular file has taken its place.
        raw = self.stack.enter_context(open(os.open(self.name, os.O_WRONLY), "wb"))
        binary = self.stack.enter_context(compressed(raw, self.name))
        self.file = self.stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8", newline="\n"))
        return self

    def write(self, text: str) -> None:
        self.file.write(text)

    def end_window(self, lines: Iterable[Line]) -> None:
        """Flush the translations."""
        self.file.flush()

    def __exit__(self, *_) -> None:
        self.stack.close()


def model_files(names: list[str]) -> dict[str, str]:
    """SHA-256 digests of all model files that affect the translations, keyed by `FILE of model NUMBER`.

    Args:
        names (`list[str]`): Checkpoint folders, or Hub repositories that are in the cache.
    """
    digests = {}
    for number, name in enumerate(names, start=1):
        local = Path(name).is_dir()
        folder = Path(name) if local else Path(cached_file(name, "config.json", local_files_only=True)).parent
        for path in sorted(folder.iterdir()):
            if any(fnmatch(path.name, pattern) for pattern in MODEL_FILES) and path.is_file():
                digests[f"{path.name} of model {number}"] = checksum(path)["sha256"]
    return digests


def read_record(record: Path, partial: Path) -> dict:
    """Read the record of a partial file.

    Raises:
        FileNotFoundError: There is no record.
        ValueError: The record is damaged or has another version.
    """
    damaged = f"--resume: {record} is damaged (delete {partial} to start over)"
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _no_partial(partial) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{damaged}: {error}") from error
    if isinstance(content, dict) and "content" in content:
        raise ValueError(
            f"--resume: {record} was written by an earlier version of this command: delete {partial} to start over."
        )
    try:
        job, done, version = content["job"], content["done"], content["version"]
        is_valid = version == VERSION and isinstance(job["settings"], dict) and isinstance(job["files"], dict)
        is_valid = is_valid and all(type(done[name]) is int and done[name] >= 0 for name in ("sentences", "bytes"))
        is_valid = is_valid and all(type(done[name]) is str for name in ("input", "output"))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{damaged}: {type(error).__name__}: {error}.") from error
    if not is_valid:
        raise ValueError(f"{damaged}: found version {version!r}, expected {VERSION}, with {done!r:.200}.")
    return content


def _changes(earlier: dict, now: dict) -> Iterator[tuple]:
    """Yield name, earlier value and present value of every entry that differs."""
    for name in dict.fromkeys([*earlier, *now]):
        if earlier.get(name) != now.get(name):
            yield name, earlier.get(name), now.get(name)


def _lock(file: BinaryIO, partial: Path, wait: bool) -> None:
    """Lock a file until it is closed.

    The lock is on the file itself. A separate lock file could not be removed without a race against other runs.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise _busy(partial) from None
    except OSError as error:  # some file systems of clusters have no locks
        logger.warning("%s cannot be locked (%s): do not resume it while this run writes it.", partial, error.strerror)


def _partial_exists(partial: Path) -> OSError:
    """Error for an existing partial file: another run is writing it, or an earlier run has left it."""
    try:
        with open(partial, "r+b") as file:
            _lock(file, partial, wait=False)
    except BlockingIOError as error:
        return error
    except OSError:  # gone, or write-protected
        pass
    return FileExistsError(
        f"{partial} holds an earlier run: pass --resume to continue it, or delete it to start over."
    )


def _busy(partial: Path) -> BlockingIOError:
    return BlockingIOError(f"{partial}: another run is writing it.")


def _no_partial(partial: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"--resume: there is no {partial} to continue, or its record {partial.name}.json is missing."
    )
