"""What is scored: parallel files, or a test set that sacreBLEU knows by name."""

from dataclasses import dataclass
from pathlib import Path

from sacrebleu.dataset import DATASETS

from ..data.readers import DataError, read_columns


@dataclass
class Texts:
    """Parallel texts: what is scored (`None`: to be made), against what, from what, and what by other systems.

    Attributes:
        hypotheses (`list[str]`, *optional*): Translations.
        references (`list[list[str]]`): A list of references for each file of them.
        sources (`list[str]`, *optional*): What was translated.
        baselines (`list[tuple[str, list[str]]]`): File and translations of each other system.
    """

    hypotheses: list[str] | None
    references: list[list[str]]
    sources: list[str] | None
    baselines: list[tuple[str, list[str]]]


def read_texts(hypotheses: str | None, references: list[str], sources: str | None, baselines: list[str]) -> Texts:
    """Texts from files.

    Raises:
        DataError: A file is empty or broken, the files have different numbers of lines, or a reference is empty, which
            is worth nothing to compare with.
        FileNotFoundError: No such file.
    """
    given = [file for file in (hypotheses, sources) if file]
    columns = read_columns([*given, *references, *baselines])
    optional = dict(zip(given, columns))
    streams = columns[len(given) : len(given) + len(references)]
    for file, lines in zip(references, streams):
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                raise DataError(f"{file}:{number}: empty reference. Remove the line from all files.")
    others = columns[len(given) + len(references) :]
    return Texts(optional.get(hypotheses), streams, optional.get(sources), list(zip(baselines, others)))


def named_test_set(name: str) -> tuple[str, list[str]]:
    """Files of the sources and of the references of a test set that sacreBLEU knows, downloaded if need be.

    Args:
        name (`str`): Test set and language pair, as in `wmt14/en-de`.

    Raises:
        DataError: There is no such test set, or not in that pair of languages.
        OSError: It is not on this machine and cannot be downloaded; the message names the files.
    """
    key, _, pair = name.rpartition("/")
    if key not in DATASETS:
        raise DataError(
            f"--test-set {name}: sacreBLEU knows no test set {key!r}. Expected a name and a language pair, as in "
            "wmt14/en-de; `sacrebleu --list` prints the names."
        )
    dataset = DATASETS[key]
    if pair not in dataset.langpairs:
        raise DataError(f"--test-set {name}: {key} has no {pair!r}, it has {', '.join(dataset.langpairs)}.")
    fields = ["src", *(field for field in dataset.fieldnames(pair) if field.startswith("ref"))]
    source, *references = files = [dataset._get_txt_file_path(pair, field) for field in fields]
    if not all(Path(file).is_file() for file in files):
        try:
            dataset.get_files(pair)
        except (OSError, SystemExit) as error:  # sacreBLEU exits where a checksum is wrong
            raise OSError(
                f"--test-set {name}: cannot be downloaded from {', '.join(dataset.data)}: {error}. Without a network, "
                f"put its text at {' and '.join(files)}, or give files with --sources and --references."
            ) from error
    return source, references


def target_language(name: str) -> str:
    """Language code of the translations of a test set: `de` of `wmt14/en-de`."""
    return Path(name).name.rpartition("-")[2]
