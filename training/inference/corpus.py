"""Lines of a file as translation requests, and their translations by all processes together."""

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
    """A line to translate: its number from 1, its text, and what its translation begins with."""

    number: int
    text: str
    prefix: str = ""


def read_sources(file: str, prefix_file: str | None = None) -> Iterator[Line]:
    """The lines of a text file or of the standard input, `-`, with those of a parallel file of prefixes.

    Raises:
        DataError: The files do not have the same number of lines, or cannot be read.
    """
    if prefix_file is None:
        for number, text in enumerate(read_lines(file), start=1):
            yield Line(number, text)
        return
    for number, (text, prefix) in enumerate(zip_longest(read_lines(file), read_lines(prefix_file)), start=1):
        if text is None or prefix is None:
            shorter, longer = (file, prefix_file) if text is None else (prefix_file, file)
            raise DataError(f"{shorter} has {number - 1} lines, {longer} has more.")
        yield Line(number, text, prefix)


@dataclass
class RequestBuilder:
    """Makes requests of lines: cuts what is too long, and looks for what cannot be translated.

    Args:
        search (`Search`): Whose model and tokenizer count.
        file (`str`), prefix_file (`str`, *optional*): What the lines are of, for messages.
        limit (`int`): Most source tokens of a line, with the end token.
        split (`bool`): Cut a longer line (see `segment.py`); otherwise it is an error.

    Attributes:
        cut (`list[int]`): Numbers of the lines that were cut.
    """

    search: Search
    file: str
    prefix_file: str | None
    limit: int
    split: bool
    cut: list[int] = field(default_factory=list)

    def requests(self, lines: list[Line]) -> list[list[Request]]:
        """Those of each line, in order: none for an empty one, several for one that is cut.

        A prefix is for the first piece. It ends where its last token does: its last word is taken as complete, and
        white space behind it as part of what follows.

        Raises:
            DataError: A line is too long and cannot or must not be cut, or a prefix fills the translation.
        """
        tokenizer, found = self.search.tokenizer, []
        for line, ids in zip(lines, encode(tokenizer, [line.text for line in lines])):
            pieces = [ids] if ids else []
            if len(ids) > self.limit:
                pieces = encode(tokenizer, self._cut(line, len(ids)))
            found.append([Request(piece, key=(line.number, index)) for index, piece in enumerate(pieces)])
            if line.prefix.strip() and pieces:
                found[-1][0].prefix = self._prefix(line, len(pieces[0]))
        return found

    def _cut(self, line: Line, tokens: int) -> list[str]:
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
                f"{self.prefix_file}:{line.number}: the prefix has {len(prefix)} tokens, and the translation of a "
                f"source of {source_tokens} ends at {longest}."
            )
        return prefix

    def notice(self) -> str:
        """What was cut; empty if nothing was."""
        if not self.cut:
            return ""
        some = ", ".join(map(str, self.cut[:5])) + (", ..." if len(self.cut) > 5 else "")
        count = f"{len(self.cut)} lines of {_name(self.file)} ({some})"
        return f"Cut into pieces, as they have more than {self.limit} tokens: {count}."

    def report(self) -> None:
        """Log what was cut, if anything was."""
        if self.cut:
            logger.warning(self.notice())


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def translate_window(
    search: Search, lines: list[list[Request]], processes: Processes, progress: tqdm
) -> list[list[Translation]]:
    """Translations of lines, given as the requests of each, by all processes together; in every process.

    Args:
        search (`Search`): With this process's models.
        lines (`list[list[Request]]`): The same in every process.
        processes (`Processes`): Who takes part.
        progress (`tqdm`): Moved on by one a line, by the end of the window.

    Returns:
        `list[list[Translation]]`: `search.n_best` a line, empty ones for an empty line.
    """
    requests, start = list(chain.from_iterable(lines)), progress.n
    whole = len(lines) / max(1, len(requests))

    def work() -> list[tuple[int, list[Translation]]]:
        found = []
        for result in search.translate(requests, processes.rank, processes.count):
            found.append(result)
            progress.update(start + int(whole * len(found)) - progress.n)
        return found

    found = dict(processes.gather(processes.together(work)))
    progress.update(start + len(lines) - progress.n)
    pieces = iter([found[index] for index in range(len(requests))])
    translations = []
    for line in lines:
        ranks = zip(*islice(pieces, len(line))) if line else [[Translation()]] * search.n_best
        translations.append([Translation.joined(list(parts)) for parts in ranks])
    return translations
