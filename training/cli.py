"""`hf-vaswani COMMAND ...`: each command is the module of that name."""

import importlib
import os
import sys
import traceback
from pathlib import Path

from .settings import KERNELS
from .versions import OWN, version


COMMANDS = {
    "train": "train a model on sentence pairs",
    "average": "average checkpoints into one",
    "translate": "translate raw text",
    "score": "score translations",
    "score-pairs": "log probabilities of given translations",
    "align": "align the words of translations with those of their sources",
    "publish": "push a checkpoint to the Hub",
    "ablate": "train rows of Table 3, and compare them with the paper's",
    "curves": "draw loss, BLEU and learning rate of a run",
    "attention": "draw what the tokens of a sentence attend to",
    "demo": "translate in the browser, or write a Space that does",
    "demo-data": "generate the sentence pairs of the demo",
    "env": "print versions and devices, for a bug report",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; what a user did wrong is one line on standard error, not a traceback.

    Args:
        argv (`list[str]`, *optional*): The words of the command line; those of the process when not given.

    Returns:
        0; 1 when the input was wrong; 2 for an unknown command.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(OWN, version(OWN))
        return 0
    if not argv or argv[0] not in COMMANDS:
        lines = [f"  {name:<11} {text}" for name, text in COMMANDS.items()]
        wanted = bool(argv) and argv[0] in ("-h", "--help")
        usage = ["usage: hf-vaswani COMMAND ...", "       hf-vaswani --version", *lines]
        print("\n".join(usage), file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    for name, value in KERNELS.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("." + argv[0].replace("-", "_"), __package__).main(argv[1:])
    except ModuleNotFoundError as error:
        print(f"hf-vaswani {argv[0]}: {error}. The commands need: pip install 'hf-vaswani[train]'", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ValueError) and not _raised_here(error):
            raise
        print(f"hf-vaswani {argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


def _raised_here(error: Exception) -> bool:
    """Whether this project raised the error, to tell its user something, and not a library that broke down."""
    folders = {Path(__file__).parent, Path(importlib.import_module("hf_vaswani").__file__).parent}
    return not folders.isdisjoint(Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents)


if __name__ == "__main__":
    sys.exit(main())
