"""Translation requests from the lines of a file, and their translation by several processes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from tqdm import tqdm

from ..data.readers import DataError, read_lines
from ..data.treebanks import read_sentences
from ..data.trees import tree_words
from .long_lines import split_line
from .search import Request, Search, Translation
from .translation import encode
from .tree_search import TreeConstraint
from .workers import Processes


logger = logging.getLogger(__name__)

MAX_SHOWN = 5  # line numbers in a message


@dataclass
class Line:
    """A line to translate: its number, counted from 1, its text, and the prefix of its translation."""

    number: int
    text: str
    prefix: str = ""


def read_sources(file: str, prefix_file: str | None = None) -> Iterator[Line]:
    """Yield the lines of a text file, or of standard input for `-`, with the prefixes of a parallel file. A file of
    trees has a line of words for each tree.

    Raises:
        DataError: The files have different numbers of lines or cannot be read.
    """
    if prefix_file is None:
        for number, text in enumerate(read_sentences(file), start=1):
            yield Line(number, text)
        return
    for number, (text, prefix) in enumerate(zip_longest(read_sentences(file), read_lines(prefix_file)), start=1):
        if text is None or prefix is None:
            shorter, longer = (file, prefix_file) if text is None else (prefix_file, file)
            raise DataError(f"{shorter} has {number - 1} lines, and {longer} has more: expected the same number.")
        yield Line(number, text, prefix)


class LineError(DataError):
    """A line that cannot be translated.

    Args:
        place (`str`): File and line.
        reason (`str`): Reason, for people.
    """

    def __init__(self, place: str, reason: str):
        super().__init__(f"{place}: {reason}")
        self.reason = reason


@dataclass
class RequestBuilder:
    """Builder of translation requests, which splits, skips or refuses lines that are too long.

    Args:
        search (`Search`): Search with the tokenizer and the length limits.
        file (`str`), prefix_file (`str`, *optional*): Files of the lines and prefixes, for messages.
        limit (`int`): Maximum source tokens of a line, end token included.
        split (`bool`): Split longer lines into pieces (see `long_lines.py`). Otherwise they cannot be translated.
        skip (`bool`): Skip lines that cannot be translated. Otherwise they are an error.
        trees (`bool`): The outputs are trees over the words of the lines.

    Attributes:
        cut (`list[int]`): Numbers of the lines that were split.
        skipped (`list[int]`): Numbers of the lines that were skipped.
        reasons (`dict[int, str]`): Why lines of the last call of `requests` were skipped, by number.
        first_reason (`str`): Why the first line of all was skipped.
    """

    search: Search
    file: str
    prefix_file: str | None
    limit: int
    split: bool
    skip: bool = False
    trees: bool = False
    cut: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    first_reason: str = ""

    def requests(self, lines: list[Line]) -> list[list[Request]]:
        """Build the requests of each line, in order: none for an empty or skipped line, several for a line that is
        split.

        A prefix applies to the first piece. Its last word is complete, and trailing white space is dropped, because
        it belongs to the token that follows.

        Raises:
            LineError: A line is too long and cannot or must not be split, or a prefix leaves no room for the
                translation; and `skip` is not set.
        """
        requests: list[list[Request]] = []
        self.reasons = {}
        texts = [" ".join(tree_words(line.text)) if self.trees else line.text for line in lines]
        for line, ids in zip(lines, encode(self.search.tokenizer, texts)):
            try:
                requests.append(self._requests(line, ids))
            except LineError as error:
                if not self.skip:
                    raise
                self.reasons[line.number] = error.reason
                self.first_reason = self.first_reason or error.reason
                requests.append([])
        self.skipped += self.reasons
        return requests

    def _requests(self, line: Line, ids: list[int]) -> list[Request]:
        pieces = [ids] if ids else []
        if is_long := len(ids) > self.limit:
            pieces = encode(self.search.tokenizer, self._split(line, len(ids)))
        requests = [Request(piece, key=(line.number, index)) for index, piece in enumerate(pieces)]
        if line.prefix.strip() and pieces:
            requests[0].prefix = self._prefix(line, len(pieces[0]))
        if self.trees and pieces:
            requests[0].words = self._words(line, len(ids))
        if is_long:
            self.cut.append(line.number)
        return requests

    def _split(self, line: Line, tokens: int) -> list[str]:
        place = f"{_name(self.file)}:{line.number}"
        if not self.split:
            raise LineError(place, f"{tokens} tokens, where {self.limit} are allowed: {line.text[:60]!r}...")
        try:
            return split_line(line.text, lambda text: len(self.search.tokenizer(text)["input_ids"]), self.limit)
        except ValueError as error:
            raise LineError(place, str(error)) from None

    def _prefix(self, line: Line, source_tokens: int) -> list[int]:
        prefix = self.search.tokenizer(text_target=line.prefix.rstrip(), add_special_tokens=False)["input_ids"]
        longest = self.search.longest_output(source_tokens)
        if longest is not None and len(prefix) >= longest:
            raise LineError(
                f"{self.prefix_file}:{line.number}",
                f"a prefix of {len(prefix)} tokens, but the translation of {source_tokens} source tokens has at most "
                f"{longest}.",
            )
        return prefix

    def _words(self, line: Line, source_tokens: int) -> list[str]:
        words, longest = tree_words(line.text), self.search.longest_output(source_tokens)
        shortest = TreeConstraint.shortest(len(words))
        if longest is not None and longest < shortest:
            raise LineError(
                f"{_name(self.file)}:{line.number}",
                f"a tree of {len(words)} words has at least {shortest} tokens, but the output of {source_tokens} "
                f"source tokens has at most {longest}.",
            )
        return words

    def notices(self) -> list[str]:
        """Messages about the lines that were split, and about those that were skipped."""
        where, notices = _name(self.file), []
        if self.cut:
            notices.append(
                f"Split into pieces, because they have more than {self.limit} tokens: {len(self.cut)} lines of "
                f"{where} ({_listed(self.cut)})."
            )
        if self.skipped:
            notices.append(
                f"Skipped, with an empty translation: {len(self.skipped)} lines of {where} ({_listed(self.skipped)}). "
                f"The first has {self.first_reason}"
            )
        return notices

    def report(self) -> None:
        """Log the lines that were split or skipped, if there are any."""
        for notice in self.notices():
            logger.warning(notice)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:MAX_SHOWN])) + (", ..." if len(numbers) > MAX_SHOWN else "")


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def translate_window(
    search: Search, lines: list[list[Request]], processes: Processes, progress: tqdm
) -> list[list[Translation]]:
    """Translate lines by all processes together. Every process returns all translations.

    Args:
        search (`Search`): Search with the models of this process.
        lines (`list[list[Request]]`): Requests of each line, the same in every process.
        processes (`Processes`): Processes that take part.
        progress (`tqdm`): Progress bar, advanced once per line by the end of the window.

    Returns:
        `list[list[Translation]]`: `search.n_best` translations per line, empty ones for a line without requests.
    """
    requests, start = list(chain.from_iterable(lines)), progress.n
    lines_per_request = len(lines) / max(1, len(requests))

    def translate_share() -> list[tuple[int, list[Translation]]]:
        results = []
        for result in search.translate(requests, processes.rank, processes.count):
            results.append(result)
            progress.update(start + int(lines_per_request * len(results)) - progress.n)
        return results

    by_index = dict(processes.gather(processes.together(translate_share)))
    progress.update(start + len(lines) - progress.n)
    pieces = iter([by_index[index] for index in range(len(requests))])
    translations = []
    for line in lines:
        ranks = zip(*islice(pieces, len(line))) if line else [[Translation()]] * search.n_best
        translations.append([Translation.joined(list(parts)) for parts in ranks])
    return translations
