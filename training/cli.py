"""Entry point of `hf-vaswani COMMAND ...`. Each command is the module of the same name."""

import importlib.util
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
    "score-pairs": "print the log probabilities of given translations",
    "align": "align the words of translations with the words of their sources",
    "publish": "push a checkpoint to the Hub",
    "ablate": "train rows of the paper's Table 3 and compare the results with the paper's",
    "curves": "draw the loss, BLEU and learning rate of a run",
    "attention": "draw the attention between the tokens of a sentence and its translation",
    "demo": "serve a translation page in the browser, or write a Hugging Face Space with it",
    "demo-data": "generate the sentence pairs of the demo",
    "env": "print versions and devices, for a bug report",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. User errors are printed as one line on standard error, without a traceback.

    Args:
        argv (`list[str]`, *optional*): Command-line arguments; defaults to those of the process.

    Returns:
        Exit status: 0 for success, 1 for invalid input, 2 for an unknown command.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(OWN, version(OWN))
        return 0
    if not argv or argv[0] not in COMMANDS:
        lines = [f"  {name:<11} {text}" for name, text in COMMANDS.items()]
        is_help = bool(argv) and argv[0] in ("-h", "--help")
        usage = ["usage: hf-vaswani COMMAND ...", "       hf-vaswani --version", *lines]
        print("\n".join(usage), file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    for name, value in KERNELS.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("." + argv[0].replace("-", "_"), __package__).main(argv[1:])
    except ModuleNotFoundError as error:
        print(f"hf-vaswani {argv[0]}: {error}. The commands need: pip install 'hf-vaswani[train]'", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ValueError) and not _raised_by_project(error):
            raise
        print(f"hf-vaswani {argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


def _raised_by_project(error: Exception) -> bool:
    """Return `True` if code of this project raised the error, as a message for the user, and `False` for a library."""
    folders = {Path(__file__).parent, Path(importlib.util.find_spec("hf_vaswani").origin).parent}
    return not folders.isdisjoint(Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents)


if __name__ == "__main__":
    sys.exit(main())
