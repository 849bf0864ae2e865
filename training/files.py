"""Files that commands write: refused before the work where something would be destroyed; written atomically."""

import contextlib
import gzip
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO


if TYPE_CHECKING:
    from matplotlib.figure import Figure


PICTURES = (".png", ".svg", ".pdf")
# Endings of what is read from a checkpoint's folder.
MODEL_FILES = (".json", ".safetensors", ".py")


def check_output(
    file: str | Path, inputs: Iterable[str | Path | None] = (), option: str = "--output", streams: bool = False
) -> None:
    """Refuse a name that nothing can or may be written to. For the start of a command, before anything is loaded.

    Args:
        file (`str` or `Path`): File to write. A regular file may be there, and is to be replaced.
        inputs (`list[str]`): What the command reads: files, folders of models, `-` for the standard input. What is
            `None` or not there is passed over.
        option (`str`): How the command line calls the file, for messages.
        streams (`bool`): Whether a FIFO or a character device may be there, which is written to as it is.

    Raises:
        FileExistsError: Something else than a regular file is there: a symbolic link, a device, a FIFO, a socket.
        FileNotFoundError, NotADirectoryError: There is no such folder.
        IsADirectoryError: It is a folder.
        PermissionError: It may not be written.
        ValueError: It is one of the inputs, by whatever name.
    """
    path, said = Path(file), f"{option} {file}"
    if not os.path.basename(file):
        raise IsADirectoryError(f"{option} {str(file)!r}: expected the name of a file.")
    if streams and is_stream(file):
        if path.is_fifo():
            _check_not_input(path, inputs, said)
        return
    _check_folder(path.parent, said)
    if path.is_symlink():
        raise FileExistsError(f"{said}: is a symbolic link to {os.readlink(path)}; name the file itself.")
    if path.is_dir():
        raise IsADirectoryError(f"{said}: is a folder, expected a file.")
    with contextlib.suppress(FileNotFoundError):
        _aside(path).lstat()  # a name that is too long is an error here already
    if not path.exists():
        return
    if not path.is_file():
        raise FileExistsError(f"{said}: is a {_kind(path)}, which a file would take the place of.")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{said}: is write-protected.")
    _check_not_input(path, inputs, said)


def check_output_folder(folder: str | Path, option: str = "--output") -> None:
    """Refuse a name that no folder can be made of. For the start of a command, as `check_output`.

    Args:
        folder (`str` or `Path`): Folder to write to, which may be there.
        option (`str`): How the command line calls it.

    Raises:
        FileExistsError, NotADirectoryError: Something else is there, or in the place of a folder above it.
        PermissionError: It may not be written.
    """
    path, said = Path(folder), f"{option} {folder}"
    if path.is_symlink() and not path.exists():
        raise FileExistsError(f"{said}: is a symbolic link to {os.readlink(path)}, which is not there.")
    while not os.path.lexists(path):
        path = path.parent
    _check_folder(path, said)


def is_stream(file: str | Path) -> bool:
    """Whether a name leads to a FIFO or a character device, as /dev/null is one."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _kind(path: Path) -> str:
    return "FIFO" if path.is_fifo() else "socket" if path.is_socket() else "device"


def _check_folder(folder: Path, said: str) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"{said}: no such folder, {folder}.")
    if not folder.is_dir():
        raise NotADirectoryError(f"{said}: {folder} is no folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{said}: nothing may be written to the folder {folder}.")


def _check_not_input(path: Path, inputs: Iterable[str | Path | None], said: str) -> None:
    for given in inputs:
        if given is None:
            continue
        if given == "-" and _same(0, path):
            raise ValueError(f"{said}: is the standard input, which would be overwritten.")
        files = [Path(given)]
        if given != "-" and Path(given).is_dir():
            files = [each for each in Path(given).iterdir() if each.suffix in MODEL_FILES]
        if given != "-" and (read := next((each for each in files if _same(each, path)), None)):
            raise ValueError(f"{said}: is the same file as {read}, which is read.")


def _same(file: Path | int, other: Path) -> bool:
    try:
        return os.path.samefile(file, other)
    except OSError:
        return False


def _aside(path: Path) -> Path:
    """A name beside a file, at which nothing can have been put beforehand."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def compressed(raw: BinaryIO, name: str | Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """What compresses into a file, if its name ends in `.gz`; otherwise the file itself, left open."""
    if Path(name).suffix != ".gz":
        return contextlib.nullcontext(raw)
    return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file, compressed if its name ends in `.gz`, that takes its place when the context ends without an error.

    Whenever the process is killed, at `path` is what was there before or the whole new file. A symbolic link there is
    replaced, not followed.
    """
    partial = _aside(path)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(partial, "xb"))
        stack.callback(partial.unlink, missing_ok=True)  # if something fails
        with compressed(raw, path) as file:
            yield file
        raw.flush()
        os.fsync(raw.fileno())
        partial.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8; see `written_whole`."""
    with written_whole(path) as file:
        file.write(text.encode("utf-8"))


def save_whole(figure: "Figure", path: Path, dpi: int) -> None:
    """Save a picture atomically.

    Args:
        figure (`matplotlib.figure.Figure`): What it shows.
        path (`Path`): File to write; the ending chooses the format, which is PNG without one.
        dpi (`int`): Dots per inch.
    """
    with written_whole(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=dpi)
