"""Translation requests from the lines of a file, and their translation by several processes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from tqdm import tqdm

from ..data.readers import DataError, read_lines
from .long_lines import split_line
from .search import Request, Search, Translation
from .translation import encode
from .workers import Processes


logger = logging.getLogger(__name__)


@dataclass
class Line:
    """A line to translate: its number, counted from 1, its text, and the prefix of its translation."""

    number: int
    text: str
    prefix: str = ""


def read_sources(file: str, prefix_file: str | None = None) -> Iterator[Line]:
    """Yield the lines of a text file, or of standard input for `-`, with the prefixes of a parallel file.

    Raises:
        DataError: The files have different numbers of lines or cannot be read.
    """
    if prefix_file is None:
        for number, text in enumerate(read_lines(file), start=1):
            yield Line(number, text)
        return
    for number, (text, prefix) in enumerate(zip_longest(read_lines(file), read_lines(prefix_file)), start=1):
        if text is None or prefix is None:
            shorter, longer = (file, prefix_file) if text is None else (prefix_file, file)
            raise DataError(f"{shorter} has {number - 1} lines, and {longer} has more: expected the same number.")
        yield Line(number, text, prefix)


@dataclass
class RequestBuilder:
    """Builder of translation requests, which splits or refuses lines that are too long.

    Args:
        search (`Search`): Search with the tokenizer and the length limits.
        file (`str`), prefix_file (`str`, *optional*): Files of the lines and prefixes, for messages.
        limit (`int`): Maximum source tokens of a line, end token included.
        split (`bool`): Split longer lines into pieces (see `long_lines.py`). Otherwise they are an error.

    Attributes:
        cut (`list[int]`): Numbers of the lines that were split.
    """

    search: Search
    file: str
    prefix_file: str | None
    limit: int
    split: bool
    cut: list[int] = field(default_factory=list)

    def requests(self, lines: list[Line]) -> list[list[Request]]:
        """Build the requests of each line, in order: none for an empty line, several for a line that is split.

        A prefix applies to the first piece. Its last word is complete, and trailing white space is dropped, because
        it belongs to the token that follows.

        Raises:
            DataError: A line is too long and cannot or must not be split, or a prefix leaves no room for the
                translation.
        """
        tokenizer, requests = self.search.tokenizer, []
        for line, ids in zip(lines, encode(tokenizer, [line.text for line in lines])):
            pieces = [ids] if ids else []
            if len(ids) > self.limit:
                pieces = encode(tokenizer, self._split(line, len(ids)))
            requests.append([Request(piece, key=(line.number, index)) for index, piece in enumerate(pieces)])
            if line.prefix.strip() and pieces:
                requests[-1][0].prefix = self._prefix(line, len(pieces[0]))
        return requests

    def _split(self, line: Line, tokens: int) -> list[str]:
        place = f"{_name(self.file)}:{line.number}"
        if not self.split:
            raise DataError(f"{place}: {tokens} tokens, where {self.limit} are allowed: {line.text[:60]!r}...")
        try:
            pieces = split_line(line.text, lambda text: len(self.search.tokenizer(text)["input_ids"]), self.limit)
        except ValueError as error:
            raise DataError(f"{place}: {error}") from None
        self.cut.append(line.number)
        return pieces

    def _prefix(self, line: Line, source_tokens: int) -> list[int]:
        prefix = self.search.tokenizer(line.prefix.rstrip(), add_special_tokens=False)["input_ids"]
        longest = self.search.longest_output(source_tokens)
        if longest is not None and len(prefix) >= longest:
            raise DataError(
                f"{self.prefix_file}:{line.number}: the prefix has {len(prefix)} tokens, but the translation of "
                f"{source_tokens} source tokens has at most {longest}."
            )
        return prefix

    def notice(self) -> str:
        """Message about the lines that were split; empty if there are none."""
        if not self.cut:
            return ""
        numbers = ", ".join(map(str, self.cut[:5])) + (", ..." if len(self.cut) > 5 else "")
        return (
            f"Split into pieces, because they have more than {self.limit} tokens: {len(self.cut)} lines of "
            f"{_name(self.file)} ({numbers})."
        )

    def report(self) -> None:
        """Log the lines that were split, if there are any."""
        if self.cut:
            logger.warning(self.notice())


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
        `list[list[Translation]]`: `search.n_best` translations per line, empty ones for an empty line.
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
