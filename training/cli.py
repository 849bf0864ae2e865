"""Entry point of `hf-vaswani COMMAND ...`. Each command is the module of the same name."""

import sys

from .options import suggestion
from .running import run
from .versions import OWN, version


COMMANDS = {
    "train": "train a model on sentence pairs",
    "average": "average checkpoints into one",
    "translate": "translate raw text",
    "score": "score translations",
    "score-pairs": "print the log probabilities of given translations",
    "align": "align the words of translations with the words of their sources",
    "convert": "convert models of other toolkits (OPUS-MT, Marian, FSMT) to checkpoints, and back",
    "compile": "compile kernels that make 8-bit models faster",
    "publish": "push a checkpoint to the Hub",
    "ablate": "train rows of the paper's Table 3 and compare the results with the paper's",
    "curves": "draw the loss, BLEU or F1 and learning rate of a run",
    "attention": "draw the attention between the tokens of a sentence and its translation",
    "figures": "draw the figures of the paper, with the code that each one shows",
    "demo": "serve a translation page in the browser, or write a Hugging Face Space with it",
    "demo-data": "generate the sentence pairs of the demo",
    "env": "print versions and devices, for a bug report",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `run`.

    Args:
        argv (`list[str]`, *optional*): Command-line arguments; defaults to those of the process.

    Returns:
        Exit status: 0 for success, 1 for invalid input, 2 for an unknown command, 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(OWN, version(OWN))
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:<11} {text}" for name, text in COMMANDS.items()]
        usage = ["usage: hf-vaswani COMMAND ...", "       hf-vaswani --version", *lines]
        print("\n".join(usage), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"hf-vaswani: error: unknown command {argv[0]}.{suggestion(argv[0], COMMANDS)}", file=sys.stderr)
        print("hf-vaswani --help lists the commands.", file=sys.stderr)
        return 2
    return run(argv[0], argv[1:])


if __name__ == "__main__":
    sys.exit(main())
