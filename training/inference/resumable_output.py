"""Where translations are written to: a file that can be resumed after an interruption, or a stream."""

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

from ..files import compressed, write_whole, written_whole
from .corpus import Line


logger = logging.getLogger(__name__)

VERSION = 2  # of the record
# What of a checkpoint decides how it translates.
MODEL_FILES = ("model*.safetensors*", "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json")
PIECE = 2**20  # bytes read at a time


class PartialOutput:
    """A file of translations that grows beside its final place, and can be gone on with after an interruption.

    The file appears when everything is translated, compressed if its name ends in `.gz`. Until then its lines are in
    `OUTPUT.partial`, which is locked, and `OUTPUT.partial.json` says what they were made from and how many of them are
    whole windows. What is behind these is cut off on `--resume`, as the batches of a window are made of all its lines.

    Args:
        output (`str`): File to write.
        job (`dict`): What the translations depend on beside the lines: `settings`, and digests of `files`.
        sources (`Iterator[Line]`): The lines from the first on; those that are translated are compared.
        resume (`bool`): Go on with a partial file.
        most_lines (`int`, *optional*): Lines that the whole output has.

    Attributes:
        sentences (`int`): How many are there already, once the file is entered as a context.

    Raises:
        BlockingIOError: When it is entered, as all of these: another run is writing it.
        FileExistsError: There is a partial file, and it is not to be gone on with.
        FileNotFoundError: There is none to go on with.
        ValueError: It was made from something else, or is damaged.
    """

    def __init__(
        self, output: str, job: dict, sources: Iterator[Line], resume: bool = False, most_lines: int | None = None
    ):
        self.output = Path(output)
        self.partial, self.record = partial_files(output)
        self.job, self.sources, self.resume, self.most_lines = job, sources, resume, most_lines
        self.sentences = self.size = 0
        self.read, self.written = hashlib.sha256(), hashlib.sha256()

    @classmethod
    def check(cls, output: str, resume: bool) -> None:
        """Raises at once what entering would raise, as far as that can be seen without a lock."""
        partial, record = partial_files(output)
        if not resume and partial.exists():
            raise _taken(partial)
        if resume and not (partial.is_file() and record.is_file()):
            raise _nothing_there(partial)

    def __enter__(self) -> "PartialOutput":
        with ExitStack() as stack:
            self.file = stack.enter_context(self._open())
            if self.resume:
                self._go_on()
            else:
                self._write_record()
            stack.pop_all()
        return self

    def _open(self) -> BinaryIO:
        """The partial file, locked; it was there if and only if it is to be gone on with."""
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open(self.partial, "r+b" if self.resume else "x+b"))
            except FileExistsError:
                raise _taken(self.partial) from None
            except FileNotFoundError:
                if not self.resume:
                    raise
                raise _nothing_there(self.partial) from None
            # Who has just made it waits for those who only look whether it is locked.
            _lock(file, self.partial, wait=not self.resume)
            if not self._is_in_place(file):  # another run has finished it meanwhile, or it is a symbolic link
                raise _nothing_there(self.partial) if self.resume else _busy(self.partial)
            stack.pop_all()
        return file

    def _is_in_place(self, file: BinaryIO) -> bool:
        try:
            found = self.partial.lstat()
        except FileNotFoundError:
            return False
        return S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(file.fileno()))

    def _go_on(self) -> None:
        """Compare what is there with what the record says and with the input, and cut off what is no whole window."""
        record = read_record(self.record, self.partial)
        earlier, job = record["job"], json.loads(json.dumps(self.job))
        changed = [
            f"{name} ({then!r}, now {now!r})" for name, then, now in _changes(earlier["settings"], job["settings"])
        ]
        changed += [name for name, _, _ in _changes(earlier["files"], job["files"])]
        if changed:
            raise ValueError(f"--resume: {self.partial} is of another run: {', '.join(changed)}.")
        self._check_written(record["done"])
        self._check_sources(record["done"])
        self.file.truncate(self.size)
        self.file.seek(self.size)

    def _check_written(self, done: dict) -> None:
        where = f"--resume: {self.partial}"
        if (size := os.fstat(self.file.fileno()).st_size) < done["bytes"]:
            raise ValueError(f"{where} has {size} bytes, and {self.record} says {done['bytes']}: it was cut off.")
        lines = 0
        while piece := self.file.read(min(PIECE, done["bytes"] - self.size) or PIECE):
            lines += piece.count(b"\n")
            if self.size < done["bytes"]:
                self.written.update(piece)
                self.size += len(piece)
        if self.written.hexdigest() != done["output"]:
            raise ValueError(f"{where} was changed since it was written: {self.record} has another checksum of it.")
        if self.most_lines is not None and lines > self.most_lines:
            raise ValueError(f"{where} has {lines} lines, and the translation of the input has {self.most_lines}.")

    def _check_sources(self, done: dict) -> None:
        where = f"--resume: {self.partial} is of another input"
        for line in islice(self.sources, done["sentences"]):
            self._note(line)
        if self.sentences < done["sentences"]:
            raise ValueError(f"{where}: it has {done['sentences']} lines translated, of {self.sentences}.")
        if self.read.hexdigest() != done["input"]:
            raise ValueError(f"{where}: the first {self.sentences} lines, which are translated, were others.")
        if self.sentences % self.job["settings"]["window"] and next(self.sources, None) is not None:
            raise ValueError(f"{where}: it ended after line {self.sentences}, and now goes on.")

    def _write_record(self) -> None:
        done = {"sentences": self.sentences, "bytes": self.size}
        done |= {"input": self.read.hexdigest(), "output": self.written.hexdigest()}
        write_whole(self.record, json.dumps({"version": VERSION, "job": self.job, "done": done}, indent=2) + "\n")

    def _note(self, line: Line) -> None:
        self.read.update(f"{line.text}\n{line.prefix}\n".encode())
        self.sentences += 1

    def write(self, text: str) -> None:
        data = text.encode()
        self.file.write(data)
        self.written.update(data)
        self.size += len(data)

    def end_window(self, lines: Iterable[Line]) -> None:
        """The translations of these lines are all written: an interruption after this does not lose them."""
        for line in lines:
            self._note(line)
        self._sync()
        self._write_record()

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def __exit__(self, kind, *_) -> None:
        with self.file:  # whose end is the lock's: until then nobody else can go on with it
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        self._sync()
        if not self._is_in_place(self.file):
            raise FileNotFoundError(f"{self.partial} was moved or replaced while it was written.")
        if self.output.suffix == ".gz":
            self.file.seek(0)
            with written_whole(self.output) as file:
                shutil.copyfileobj(self.file, file)
            self.partial.unlink()
        else:
            self.partial.replace(self.output)
        self.record.unlink()


class DirectOutput:
    """Standard output, a FIFO or a character device, which translations are written to as they come.

    Args:
        file (`str`, *optional*): FIFO or device to open, when this is entered as a context: of a FIFO, once it is
            read. Compressed if its name ends in `.gz`. The standard output when not given.
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
        # Neither made nor cut off, should there be a regular file by now.
        raw = self.stack.enter_context(open(os.open(self.name, os.O_WRONLY), "wb"))
        binary = self.stack.enter_context(compressed(raw, self.name))
        self.file = self.stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8", newline="\n"))
        return self

    def write(self, text: str) -> None:
        self.file.write(text)

    def end_window(self, lines: Iterable[Line]) -> None:
        """Hand on what was written."""
        self.file.flush()

    def __exit__(self, *_) -> None:
        self.stack.close()


def partial_files(output: str) -> tuple[Path, Path]:
    """Where an output grows, and the record of what it is made from."""
    return Path(f"{output}.partial"), Path(f"{output}.partial.json")


def model_files(names: list[str]) -> dict[str, str]:
    """SHA-256 of all files of models that decide how they translate, by `FILE of model NUMBER`.

    Args:
        names (`list[str]`): Checkpoint folders, or repositories of the Hub that have been loaded.
    """
    found = {}
    for number, name in enumerate(names, start=1):
        local = Path(name).is_dir()
        folder = Path(name) if local else Path(cached_file(name, "config.json", local_files_only=True)).parent
        for path in sorted(folder.iterdir()):
            if any(fnmatch(path.name, pattern) for pattern in MODEL_FILES) and path.is_file():
                found[f"{path.name} of model {number}"] = checksum(path)["sha256"]
    return found


def read_record(record: Path, partial: Path) -> dict:
    """What stands beside a partial file.

    Raises:
        FileNotFoundError: There is no record.
        ValueError: It cannot be understood.
    """
    damaged = f"--resume: {record} is damaged, delete {partial} to start anew"
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _nothing_there(partial) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{damaged}: {error}") from error
    if isinstance(found, dict) and "content" in found:
        raise ValueError(
            f"--resume: {record} is of an earlier version of this command: delete {partial} to start anew."
        )
    try:
        job, done = found["job"], found["done"]
        good = found["version"] == VERSION and isinstance(job["settings"], dict) and isinstance(job["files"], dict)
        good = good and all(type(done[name]) is int and done[name] >= 0 for name in ("sentences", "bytes"))
        good = good and all(type(done[name]) is str for name in ("input", "output"))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{damaged}: {type(error).__name__}: {error}.") from error
    if not good:
        raise ValueError(f"{damaged}: version {found['version']!r}, {done!r:.200}.")
    return found


def _changes(earlier: dict, now: dict) -> Iterator[tuple]:
    """Name, earlier and present value of what is not the same."""
    for name in dict.fromkeys([*earlier, *now]):
        if earlier.get(name) != now.get(name):
            yield name, earlier.get(name), now.get(name)


def _lock(file: BinaryIO, partial: Path, wait: bool) -> None:
    """Locks a file until it is closed. The lock is its own, not that of a file beside it, which would have to be
    removed at a moment when nobody else has opened it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise _busy(partial) from None
    except OSError as error:  # some file systems of clusters have no locks
        logger.warning("%s cannot be locked (%s): do not resume it while it is written.", partial, error.strerror)


def _taken(partial: Path) -> OSError:
    """Why a partial file cannot be begun where one is."""
    try:
        with open(partial, "r+b") as file:
            _lock(file, partial, wait=False)
    except BlockingIOError as error:
        return error
    except OSError:  # gone, or write-protected
        pass
    return FileExistsError(
        f"{partial} holds an earlier run: pass --resume to go on with it, or delete it to start anew."
    )


def _busy(partial: Path) -> BlockingIOError:
    return BlockingIOError(f"{partial}: another run is writing it.")


def _nothing_there(partial: Path) -> FileNotFoundError:
    return FileNotFoundError(f"--resume: there is no {partial} to go on with, or not its {partial.name}.json.")
