"""Compile the kernels in C++ that make 8-bit models faster on this machine.

They need a C++ compiler and ninja (`pip install 'hf-vaswani[compiled]'`), and take half a minute once. Without them,
PyTorch computes the same numbers.
"""

import argparse
import sys

from .options import Parser
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani compile`."""
    return Parser(prog="hf-vaswani compile", description=__doc__)


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani compile`."""
    make_parser().parse_args(argv)

    from hf_vaswani.compiled import build

    print(f"Compiled {build()}")


if __name__ == "__main__":
    sys.exit(run("compile"))
