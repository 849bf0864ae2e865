"""Output files of the commands: paths are checked before the work begins, and files are written atomically."""

import contextlib
import gzip
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO


if TYPE_CHECKING:
    from matplotlib.figure import Figure


PICTURES = (".png", ".svg", ".pdf")
MODEL_FILES = (".json", ".safetensors", ".py")  # suffixes of the files that are read from a checkpoint folder


def check_output(
    file: str | Path, inputs: Iterable[str | Path | None] = (), option: str = "--output", streams: bool = False
) -> None:
    """Refuse a path that cannot be written or must not be overwritten. Call it before anything is loaded.

    Args:
        file (`str` or `Path`): File to write. An existing regular file is accepted and will be replaced.
        inputs (`list[str]`): Inputs of the command: files, model folders, `-` for standard input. `None` and missing
            files are ignored.
        option (`str`): Name of the option that gives the file, for messages.
        streams (`bool`): Also accept a FIFO or a character device, which is written to directly.

    Raises:
        FileExistsError: The path is not a regular file but a symbolic link, device, FIFO or socket.
        FileNotFoundError, NotADirectoryError: The parent folder does not exist.
        IsADirectoryError: The path is a folder.
        PermissionError: The path is not writable.
        ValueError: The path is one of the inputs, possibly under another name.
    """
    path, label = Path(file), f"{option} {file}"
    if not os.path.basename(file):
        raise IsADirectoryError(f"{option} {str(file)!r}: expected the name of a file.")
    if streams and is_stream(file):
        if path.is_fifo():
            _check_not_input(path, inputs, label)
        return
    _check_folder(path.parent, label)
    if path.is_symlink():
        raise FileExistsError(f"{label}: is a symbolic link to {os.readlink(path)}; name the file itself.")
    if path.is_dir():
        raise IsADirectoryError(f"{label}: is a folder, expected a file.")
    with contextlib.suppress(FileNotFoundError):
        _temporary_path(path).lstat()  # raises for a name that is too long
    if not path.exists():
        return
    if not path.is_file():
        raise FileExistsError(f"{label}: is a {_kind(path)}, expected a regular file or a new name.")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{label}: is write-protected.")
    _check_not_input(path, inputs, label)


def check_output_folder(folder: str | Path, option: str = "--output") -> None:
    """Refuse a path where no folder can be created or written to. Call it before anything is loaded.

    Args:
        folder (`str` or `Path`): Folder to write to. It may exist.
        option (`str`): Name of the option that gives the folder, for messages.

    Raises:
        FileExistsError, NotADirectoryError: The path, or a parent of it, is not a folder.
        PermissionError: The folder is not writable.
    """
    path, label = Path(folder), f"{option} {folder}"
    if path.is_symlink() and not path.exists():
        raise FileExistsError(f"{label}: is a symbolic link to {os.readlink(path)}, which does not exist.")
    while not os.path.lexists(path):
        path = path.parent
    _check_folder(path, label)


def is_stream(file: str | Path) -> bool:
    """Return `True` for the path of a FIFO or of a character device such as /dev/null."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def partial_files(output: str) -> tuple[Path, Path]:
    """Paths of the partial file of an output and of its record."""
    return Path(f"{output}.partial"), Path(f"{output}.partial.json")


def _kind(path: Path) -> str:
    return "FIFO" if path.is_fifo() else "socket" if path.is_socket() else "device"


def _check_folder(folder: Path, label: str) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"{label}: no such folder: {folder}.")
    if not folder.is_dir():
        raise NotADirectoryError(f"{label}: {folder} is not a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{label}: the folder {folder} is not writable.")


def _check_not_input(path: Path, inputs: Iterable[str | Path | None], label: str) -> None:
    for name in inputs:
        if name is None:
            continue
        if name == "-":
            if _same_file(0, path):
                raise ValueError(f"{label}: is the same file as standard input, which would be overwritten.")
            continue
        files = [Path(name)]
        if files[0].is_dir():
            files = [file for file in files[0].iterdir() if file.suffix in MODEL_FILES]
        if (input_file := next((file for file in files if _same_file(file, path)), None)) is not None:
            raise ValueError(f"{label}: is the same file as the input {input_file}, which would be overwritten.")


def _same_file(file: Path | int, other: Path) -> bool:
    try:
        return os.path.samefile(file, other)
    except OSError:
        return False


def _temporary_path(path: Path) -> Path:
    """An unpredictable path in the same folder, where nobody can have placed a file beforehand."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def compressed(raw: BinaryIO, name: str | Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Wrap a file in a gzip compressor if `name` ends in `.gz`; otherwise return it unchanged. Leaves it open."""
    if Path(name).suffix != ".gz":
        return contextlib.nullcontext(raw)
    return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Context that yields a file to write, and moves it to `path` atomically if the context ends without an error.

    If the process is killed, `path` holds either its previous content or the complete new file. The file is compressed
    if the name ends in `.gz`. An existing symbolic link is replaced, not followed.
    """
    partial = _temporary_path(path)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(partial, "xb"))
        stack.callback(partial.unlink, missing_ok=True)  # clean up after an error
        with compressed(raw, path) as file:
            yield file
        raw.flush()
        os.fsync(raw.fileno())
        partial.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8; see `written_whole`."""
    with written_whole(path) as file:
        file.write(text.encode("utf-8"))


def sync(folder: Path) -> None:
    """Sync a folder and its content to disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def folder_written_whole(path: Path, replace: bool = False) -> Iterator[Path]:
    """Context that yields a new folder, and moves it to `path` atomically if the context ends without an error.

    If the process is killed, `path` is as it was before, or the complete new folder. If it is killed while it replaces
    a folder, both may stand beside `path` under temporary names.

    Args:
        path (`Path`): Folder to write: a new or an empty one. Missing parents are created.
        replace (`bool`): Replace a folder that is not empty.

    Raises:
        FileExistsError: `path` is something else.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and (replace or not any(path.iterdir())))):
        raise FileExistsError(f"{path}: expected a new name or an empty folder.")
    partial, earlier = _temporary_path(path), _temporary_path(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync(partial)
        if replace and path.exists():
            path.rename(earlier)
        partial.rename(path)  # fails if the folder has been filled meanwhile
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_whole(figure: "Figure", path: Path, dpi: int) -> None:
    """Save a figure atomically.

    Args:
        figure (`matplotlib.figure.Figure`): Figure to save.
        path (`Path`): File to write. The suffix selects the format; without a suffix it is PNG.
        dpi (`int`): Resolution in dots per inch.
    """
    with written_whole(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=dpi)
