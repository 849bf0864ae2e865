"""Argument parser of the commands, and options and argparse types that several of them share."""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterable


OptionGroup = argparse._ActionsContainer  # a parser, or a group of its options
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Question after an unknown name, with the closest known one; empty if none is close.

    >>> suggestion("trian", ["train", "translate"])
    " Did you mean 'train'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


class Parser(argparse.ArgumentParser):
    """Argument parser of a command.

    An option may be spelled with dashes or underscores; help shows one spelling. Options are not abbreviated. An error
    is one line, which suggests the closest option or choice, and a second line that points to `--help`.

    Attributes:
        separator (`str`): Separator of words in the options as they are defined, a dash or an underscore.
    """

    separator = "-"

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument(
            "--verbose", action="store_true", help="show the warnings and progress bars of other packages as well"
        )

    @property
    def options(self) -> list[str]:
        """Spellings of all options, as they are defined."""
        return list(self._option_string_actions)

    def parse_known_args(self, args=None, namespace=None):
        words = [*(sys.argv[1:] if args is None else args)]
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(self._respelled, words[:end])
        self.check_names([word.partition("=")[0] for word in words[:end] if re.match(r"--\w[\w-]*(=|$)", word)])
        return super().parse_known_args(words, namespace)

    def _respelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name in self.options or not re.fullmatch(r"--\w[\w-]*", name):
            return word
        return "--" + re.sub("[-_]", self.separator, name[2:]) + equals + value

    def check_names(self, names: list[str]) -> None:
        """Report the first unknown option, before argparse reports options that are missing."""
        for name in names:
            if name not in self.options:
                self.error(f"unknown option {name}.{suggestion(name, self.options)}")

    def _check_value(self, action: argparse.Action, value) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += suggestion(str(value), map(str, action.choices))
            raise

    def error(self, message: str):
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options.\n")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def share(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return float(text)


def finite(text: str) -> float:
    """Parse a number that is neither NaN nor infinite."""
    if not math.isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return float(text)


def truth(text: str) -> bool:
    """Parse a truth value."""
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return values[text.lower()]


def add_trust(parser: OptionGroup) -> None:
    """Add `--trust-remote-code`, the option of every command that loads a checkpoint."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that a foreign model or tokenizer brings along (default: refuse it)",
    )


def add_dtype(parser: OptionGroup) -> None:
    """Add `--dtype`, the data type in which a command computes."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="data type of the computation (default: that of the weights)"
    )
