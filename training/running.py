"""Run one command: its errors and an interrupt are one line each, and other packages are quiet."""

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from .notices import held_back
from .settings import BARS, KERNELS, TRAINING_KERNELS


INTERRUPTED = 130  # exit status of a process that Ctrl-C ended, 128 plus the number of SIGINT
IMPORTING = "<frozen importlib._bootstrap>"  # file of the frames in which modules are imported


@contextlib.contextmanager
def handling_interrupts(name: str) -> Iterator[None]:
    """Context in which Ctrl-C ends the process at once while modules are imported.

    A KeyboardInterrupt there can be lost in C code and destructors, or come out as another error. Elsewhere it is
    raised as usual.
    """

    def handle(number: int, frame) -> None:
        if any(caller.f_code.co_filename == IMPORTING for caller, _ in traceback.walk_stack(frame)):
            report_interrupt(name)
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread():  # signals concern the main thread only
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def report_interrupt(name: str, *hints: str) -> None:
    """Print the line after Ctrl-C, one for all processes of a command."""
    if os.environ.get("RANK", "0") == "0":
        line_end = "\n" if sys.stderr.isatty() else ""  # after the ^C that the terminal shows
        print(f"{line_end}hf-vaswani {name}: interrupted.", *hints, file=sys.stderr)


@contextlib.contextmanager
def naming_resumption(hint: Callable[[], str]) -> Iterator[None]:
    """Context that adds the result of `hint` to the line after Ctrl-C: how the command can be continued.

    A training that Ctrl-C stopped after a checkpoint ends with `SystemExit` and has said so itself.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(hint()) from None


def run(name: str, argv: list[str] | None = None) -> int:
    """Run a command. User errors are printed as one line on standard error, without a traceback.

    Args:
        name (`str`): Name of the command.
        argv (`list[str]`, *optional*): Command-line arguments; defaults to those of the process.

    Returns:
        Exit status: 0 for success, 1 for invalid input, 130 after Ctrl-C.

    Raises:
        SystemExit: Status 0 for help, 2 for a mistake in the arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    kernels = TRAINING_KERNELS if name in ("train", "ablate") else KERNELS
    for variable, value in {**kernels, **BARS}.items():
        os.environ.setdefault(variable, value)
    try:
        with handling_interrupts(name), held_back("--verbose" not in argv):
            importlib.import_module("." + name.replace("-", "_"), __package__).main(argv)
    except KeyboardInterrupt as interrupt:
        report_interrupt(name, *interrupt.args)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        print(f"hf-vaswani {name}: {error}. The commands need: pip install 'hf-vaswani[train]'", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ValueError) and not is_raised_by_project(error):
            raise
        print(f"hf-vaswani {name}: {error}", file=sys.stderr)
        return 1
    return 0


def is_raised_by_project(error: Exception) -> bool:
    """Return `True` if code of this project raised the error, as a message for the user, and `False` for a library."""
    folders = {Path(__file__).parent, Path(importlib.util.find_spec("hf_vaswani").origin).parent}
    return not folders.isdisjoint(Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents)
