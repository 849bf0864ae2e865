"""Warnings, notices and progress bars of other packages, which commands hold back unless `--verbose` is given."""

import contextlib
import logging
import warnings
from collections.abc import Iterator


OWN = ("hf_vaswani", __package__)
_is_holding = False


class QuietLogger(logging.Logger):
    """Logger that drops everything below an error while notices are held back, unless it belongs to this project."""

    def isEnabledFor(self, level: int) -> bool:
        if _is_holding and level < logging.ERROR and self.name.partition(".")[0] not in OWN:
            return False
        return super().isEnabledFor(level)


def are_held_back() -> bool:
    """Return `True` while a command runs without `--verbose`."""
    return _is_holding


@contextlib.contextmanager
def held_back(hold: bool = True) -> Iterator[None]:
    """Context that holds back the warnings of other packages, if `hold` is set.

    Loggers that exist already are left alone. A command enters the context before it imports other packages.
    """
    global _is_holding
    before, logger_class = _is_holding, logging.getLoggerClass()
    _is_holding = hold
    try:
        with warnings.catch_warnings():
            if hold:
                warnings.simplefilter("ignore")
                logging.setLoggerClass(QuietLogger)
            yield
    finally:
        _is_holding = before
        logging.setLoggerClass(logger_class)
