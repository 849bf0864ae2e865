"""Texts to score: parallel files, or a named test set of sacreBLEU."""

from dataclasses import dataclass
from pathlib import Path

from sacrebleu.dataset import DATASETS

from ..data.readers import DataError, read_columns
from ..data.treebanks import is_treebank, parse_lines


@dataclass
class Texts:
    """Parallel texts of a system, its references, its sources and its baselines.

    Attributes:
        hypotheses (`list[str]`, *optional*): Translations to score; `None` if they are yet to be made.
        references (`list[list[str]]`): One list of references for each reference file.
        sources (`list[str]`, *optional*): Source sentences.
        baselines (`list[tuple[str, list[str]]]`): File and translations of each baseline system.
    """

    hypotheses: list[str] | None
    references: list[list[str]]
    sources: list[str] | None
    baselines: list[tuple[str, list[str]]]


def read_texts(hypotheses: str | None, references: list[str], sources: str | None, baselines: list[str]) -> Texts:
    """Read parallel texts from files. Sources in a file of trees, one a line, are the words of the trees.

    Raises:
        DataError: A file is empty or malformed, a reference is empty, or the numbers of lines differ.
        FileNotFoundError: No such file.
    """
    optional_files = [file for file in (hypotheses, sources) if file]
    columns = read_columns([*optional_files, *references, *baselines])
    optional = dict(zip(optional_files, columns))
    streams = columns[len(optional_files) : len(optional_files) + len(references)]
    for file, lines in zip(references, streams):
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                raise DataError(f"{file}:{number}: empty reference. Remove the line from all files.")
    outputs = columns[len(optional_files) + len(references) :]
    sentences = optional.get(sources)
    if sources and is_treebank(sources):
        sentences = [" ".join(tree.words()) for tree in parse_lines(sources, sentences)]
    return Texts(optional.get(hypotheses), streams, sentences, list(zip(baselines, outputs)))


def named_test_set(name: str) -> tuple[str, list[str]]:
    """Source file and reference files of a sacreBLEU test set, downloaded if necessary.

    Args:
        name (`str`): Test set and language pair, as in `wmt14/en-de`.

    Raises:
        DataError: Unknown test set or language pair.
        OSError: The download failed; the message names the missing files.
    """
    key, _, pair = name.rpartition("/")
    if key not in DATASETS:
        raise DataError(
            f"--test-set {name}: sacreBLEU has no test set {key!r}. Expected a name and a language pair, as in "
            "wmt14/en-de; `sacrebleu --list` prints the names."
        )
    dataset = DATASETS[key]
    if pair not in dataset.langpairs:
        raise DataError(
            f"--test-set {name}: {key} has no language pair {pair!r}; expected one of {', '.join(dataset.langpairs)}."
        )
    fields = ["src", *(field for field in dataset.fieldnames(pair) if field.startswith("ref"))]
    source, *references = files = [dataset._get_txt_file_path(pair, field) for field in fields]
    if not all(Path(file).is_file() for file in files):
        try:
            dataset.get_files(pair)
        except (OSError, SystemExit) as error:  # sacreBLEU exits on a wrong checksum
            raise OSError(
                f"--test-set {name}: cannot be downloaded from {', '.join(dataset.data)}: {error}. Without a network, "
                f"put the texts at {' and '.join(files)}, or pass files with --sources and --references."
            ) from error
    return source, references


def target_language(name: str) -> str:
    """Target language code of a test set: `de` for `wmt14/en-de`."""
    return Path(name).name.rpartition("-")[2]
