"""Sentence pairs from files of trees: words, and the symbols of the linearised tree (section 6.3 of the paper)."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value
from datasets.exceptions import DatasetGenerationError

from .readers import DataError, check_file, read_lines
from .trees import TOP, Tree, TreeError, linearise, parse_tree, read_trees, without_functions, without_traces


logger = logging.getLogger(__name__)

SUFFIX = ".trees"
# Part of the cache key. Increment it when the reader yields different rows for the same file.
READER_VERSION = 1
TREE_FEATURES = Features({"source": Value("string"), "target": Value("string"), "tree": Value("string")})


@dataclass(frozen=True)
class TreeOptions:
    """Choices in linearising trees.

    Args:
        tags (`str`): `"keep"` to predict part-of-speech tags, `"XX"` for one symbol in place of all tags.
        strip (`bool`): Remove traces and function tags.
        weights (`tuple[int, ...]`): For each file, how often its trees are read in an epoch; once if empty.
    """

    tags: str = "keep"
    strip: bool = False
    weights: tuple[int, ...] = ()


def is_treebank(file: str) -> bool:
    """Return `True` for the name of a file of trees, plain or gzipped."""
    return Path(file.removesuffix(".gz")).suffix == SUFFIX


def load_treebanks(
    files: list[str], options: TreeOptions | None = None, streaming: bool = False
) -> Dataset | IterableDataset:
    """Load files of trees in the bracketed form of the Penn Treebank.

    Args:
        files (`list[str]`): Files that end in `.trees` or `.trees.gz`. A tree stands on one line, or on several if all
            but the first are indented.
        options (`TreeOptions`, *optional*): Choices in linearising.
        streaming (`bool`): Read the trees lazily.

    Returns:
        `datasets.Dataset` (or `IterableDataset`) with the columns `source` (the words, joined by spaces), `target`
        (the symbols) and `tree` (the tree in one line, without its root `TOP`, and stripped on request).

    Raises:
        DataError: A tree is malformed, a file is empty, other files are among them, or the number of weights differs.
        OSError: A file does not exist, is not readable, or is not a regular file.
    """
    options = options or TreeOptions()
    for file in files:
        if not is_treebank(file):
            raise DataError(f"{file}: expected only files of trees ({SUFFIX}) beside {files[0]}.")
        check_file(file)
    if options.weights and len(options.weights) != len(files):
        raise DataError(f"Expected a weight for each of the {len(files)} files, found {len(options.weights)}.")
    if options.strip and not streaming:  # `from_generator` does not read a file again whose rows are in the cache
        _log_stripped(files)
    stamps = tuple((str(Path(f).resolve()), Path(f).stat().st_size, Path(f).stat().st_mtime_ns) for f in files)
    arguments = {"files": tuple(files), "options": options, "stamps": (READER_VERSION, *stamps)}
    if streaming:
        return IterableDataset.from_generator(_rows, gen_kwargs=arguments, features=TREE_FEATURES)
    try:
        return Dataset.from_generator(_rows, gen_kwargs=arguments, features=TREE_FEATURES)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (DataError, OSError)):
            raise error.__cause__ from None
        raise


def read_treebank(file: str) -> Iterator[tuple[int, Tree]]:
    """Yield line number and tree, without a root `TOP` that has one child.

    Raises:
        DataError: A tree is malformed, or there is none. The message names file, line and column.
    """
    number = 0
    try:
        for number, tree in read_trees(read_lines(file)):
            is_top = tree.label == TOP and len(tree.children) == 1 and isinstance(tree.children[0], Tree)
            yield number, tree.children[0] if is_top else tree
    except TreeError as error:
        raise DataError(f"{file}:{error.line}: column {error.column}: {error.reason}") from error
    if number == 0:
        raise DataError(f"{file}: no trees.")


def read_sentences(file: str) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for `-`; of a file of trees, the words of each tree.

    Raises:
        DataError: The file cannot be read, or a tree is malformed.
    """
    if not is_treebank(file):
        yield from read_lines(file)
        return
    for _, tree in read_treebank(file):
        yield " ".join(tree.words())


def parse_lines(file: str, lines: list[str]) -> list[Tree]:
    """Trees of the lines of a file, one a line.

    Raises:
        DataError: A line is not a tree. The message names file, line and column.
    """
    trees = []
    for number, line in enumerate(lines, start=1):
        try:
            trees.append(parse_tree(line))
        except TreeError as error:
            raise DataError(f"{file}:{number}: column {error.column}: {error.reason}") from error
    return trees


def _stripped(file: str) -> Iterator[tuple[Tree | None, int, int]]:
    """Yield each tree without traces and function tags (`None` if no word remains), and their numbers."""
    for _, tree in read_treebank(file):
        kept, traces = without_traces(tree)
        kept, functions = (None, 0) if kept is None else without_functions(kept)
        yield kept, traces, functions


def _log_stripped(files: list[str]) -> None:
    for file in files:
        total = Counter()
        for tree, traces, functions in _stripped(file):
            total.update(trees=1, empty=tree is None, traces=traces, functions=functions)
        logger.info(
            "%s: %s traces and %s function tags removed from %s trees; %s trees without words dropped.",
            *(file, *(f"{total[name]:,}" for name in ("traces", "functions", "trees", "empty"))),
        )


def _rows(files, options: TreeOptions, stamps) -> Iterator[dict[str, str]]:
    for file, weight in zip(files, options.weights or (1,) * len(files)):
        for _ in range(weight):
            trees = (tree for tree, *_ in _stripped(file)) if options.strip else (t for _, t in read_treebank(file))
            for tree in trees:
                if tree is not None:
                    symbols = " ".join(linearise(tree, options.tags))
                    yield {"source": " ".join(tree.words()), "target": symbols, "tree": str(tree)}
