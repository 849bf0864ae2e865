"""Readers of files of sentence pairs and of single sentences. Errors name the file and the line."""

import codecs
import contextlib
import gzip
import json
import os
import reprlib
import stat
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO


class DataError(ValueError):
    """Unusable data. The message names the file and the line."""


LONGEST_LINE = 2**24  # bytes, line end included; a longer line is not text and would fill the memory


def check_file(file: str, stream: bool = False) -> None:
    """Raise OSError unless `file` can be read.

    Args:
        file (`str`): Path.
        stream (`bool`): Also accept a pipe or a device, for a file that is read only once and in order.
    """
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISREG(mode):
            open(file, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{file}: no such file.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"{file}: cannot be read: {reason}.") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{file}: is a folder, not a file.")
    if not stat.S_ISREG(mode) and not stream:
        raise OSError(f"{file}: expected a regular file, because it is read more than once; found a pipe or a device.")


def is_interactive(file: str) -> bool:
    """Return `True` for `-` if standard input is a terminal."""
    return file == "-" and sys.stdin.isatty()


def read_pairs(files, langs) -> Iterator[tuple[str, str, str]]:
    """Yield triples of position ("file:line"), source and target.

    Raises:
        DataError: A file is malformed, or the two files have different numbers of lines.
    """
    if len(files) == 2:
        yield from _read_parallel(*files)
        return
    suffix = Path(files[0].removesuffix(".gz")).suffix
    readers = {".tsv": _read_tsv, ".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
    if suffix not in readers:
        raise DataError(
            f"{files[0]}: one file of pairs must end in {', '.join(readers)} or .trees, found {suffix or 'no ending'!r}."
        )
    yield from readers[suffix](files[0], langs)


def read_lines(file: str) -> Iterator[str]:
    """Yield the lines of a text file, plain or gzipped, without their line ends. Only `\\n` or `\\r\\n` ends a line.

    Args:
        file (`str`): Path, or `-` for standard input.

    Raises:
        DataError: A line is not UTF-8 or is longer than `LONGEST_LINE`, or a gzip file is truncated or damaged.
    """
    name, number, is_utf8 = "standard input" if file == "-" else file, 1, False
    with _open(file) as stream:
        try:
            for line in iter(partial(stream.readline, LONGEST_LINE + 1), b""):
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{name}:{number}: the line has more than {LONGEST_LINE:,} bytes; is it text?")
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                if line.count(b"\0") * 3 > len(line):  # UTF-16 has one for every two bytes of English
                    column = line.index(b"\0") + 1
                    raise DataError(f"{name}:{number}: byte 0x00 at column {column} is not text.{_conversion(line)}")
                yield text.removeprefix("\ufeff") if number == 1 else text  # drop the byte order mark
                number, is_utf8 = number + 1, is_utf8 or not line.isascii()
        except UnicodeDecodeError as error:
            start, bad = error.start, error.object[error.start]
            # A file that has valid UTF-8 outside of ASCII before this byte is damaged, not in another encoding.
            hint = "" if is_utf8 or not line[:start].isascii() else _conversion(line)
            raise DataError(f"{name}:{number}: byte 0x{bad:02x} at column {start + 1} is not UTF-8.{hint}") from error
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{name}:{number}: cannot be read: {error}") from error


def _conversion(line: bytes) -> str:
    """Sentence for a message that suggests how to convert a file with this line, which is not UTF-8."""
    if line.startswith(b"\x1f\x8b"):
        return " The file is compressed: its name must end in .gz."
    if b"\0" in line or line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return " If it is UTF-16, convert it: iconv -f utf16 -t utf8."
    return " If it is Latin-1, convert it: iconv -f latin1 -t utf8."


def _open(file: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if file == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    return gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb")


def _read_parallel(source_file: str, target_file: str) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, (source, target) in enumerate(zip_longest(read_lines(source_file), read_lines(target_file)), start=1):
        if source is None or target is None:
            short, long = (source_file, target_file) if source is None else (target_file, source_file)
            total = sum(1 for _ in read_lines(long))
            raise DataError(
                f"{short} has {number - 1} lines, and {long} has {total}: line {number} has no counterpart."
            )
        empty_file = source_file if not source.strip() else target_file
        yield f"{empty_file}:{number}", source, target
    if number == 0:
        raise DataError(f"{source_file}: empty file.")


def _read_tsv(file: str, langs) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, line in enumerate(read_lines(file), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(
                f"{file}:{number}: expected 2 columns ({langs[0]}, tab, {langs[1]}), found {len(columns)}."
            )
        yield f"{file}:{number}", *columns
    if number == 0:
        raise DataError(f"{file}: empty file.")


def _read_jsonl(file: str, langs) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, line in enumerate(read_lines(file), start=1):
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also an integer with too many digits
            raise DataError(f"{place}: not a JSON object: {error}") from error
        yield place, *_sides(row, langs, place)
    if number == 0:
        raise DataError(f"{file}: empty file.")


def _read_parquet(file: str, langs) -> Iterator[tuple[str, str, str]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(columns=_columns(parquet.schema_arrow.names, langs, file)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", *_sides(row, langs, f"{file}: row {number}")
    except DataError:
        raise
    except (ArrowException, ValueError, OverflowError, OSError) as error:  # ValueError: text that is not UTF-8
        extent = "as a Parquet file" if number == 0 else f"after row {number}"
        raise DataError(f"{file}: cannot be read {extent}: {' '.join(str(error).split())}") from error
    if number == 0:
        raise DataError(f"{file}: no rows.")


def _columns(names: list[str], langs, file: str) -> list[str]:
    """Names of the columns that hold the text. The other columns may have any type."""
    if "translation" in names:
        return ["translation"]
    if missing := [lang for lang in langs if lang not in names]:
        raise DataError(f"{file}: no column {missing[0]!r}; found {_listed(names)}.")
    return list(langs)


def _sides(row, langs, place: str) -> tuple[str, str]:
    """Source and target of a row `{"translation": {lang: text}}` or `{lang: text}`."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected an object with the languages {' and '.join(langs)}, found {_shown(row)}.")
    columns = row.get("translation", row)
    if not isinstance(columns, dict):
        raise DataError(
            f"{place}: column 'translation': expected an object with the languages {' and '.join(langs)}, found "
            f"{_shown(columns)}."
        )
    for lang in langs:
        if lang not in columns:
            raise DataError(f"{place}: no column {lang!r}; found {_listed(columns)}.")
        text = columns[lang]
        if not isinstance(text, str):
            raise DataError(f"{place}: column {lang!r} is not text: {_shown(text)}.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(
                f"{place}: column {lang!r} holds half a surrogate pair, which is not valid text: {_shown(text)}."
            )
    return columns[langs[0]], columns[langs[1]]


def _listed(names) -> str:
    """The first ten column names, each cut to 40 characters, for a message."""
    shown = [f"{name:.40}" for name in list(names)[:10]]
    return ", ".join(shown + ["..."] * (len(names) > 10)) or "none"


def _shown(value) -> str:
    """The beginning of a value, for a message. Plain `repr` fails on deep nesting and on very long integers."""
    return f"{reprlib.repr(value):.60}"


def read_parallel(hypotheses: str, references: list[str]) -> tuple[list[str], list[list[str]]]:
    """Read translations and, for each of them, the list of its references.

    Raises:
        DataError: A file is empty or malformed, or the files have different numbers of lines.
        FileNotFoundError: A file does not exist.
    """
    first, *others = read_columns([hypotheses, *references])
    return first, [list(group) for group in zip(*others)]


def read_columns(files: list[str]) -> list[list[str]]:
    """Read the lines of parallel files, one list per file. Raises as `read_parallel`."""
    columns: list[list[str]] = []
    for file in files:
        check_file(file, stream=True)
        columns.append(list(read_lines(file)))
        num_lines, first_lines = len(columns[-1]), len(columns[0])
        if not num_lines:
            raise DataError(f"{file}: empty file.")
        if num_lines != first_lines:
            longer = file if num_lines > first_lines else files[0]
            raise DataError(
                f"{files[0]} has {first_lines} lines, and {file} has {num_lines}: "
                f"{longer}:{min(num_lines, first_lines) + 1} has no counterpart."
            )
    return columns
