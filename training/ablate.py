"""Table 3 as an experiment: train its rows at a chosen scale, and draw the table beside the paper's.

    hf-vaswani ablate --config RECIPE --rows base A D --seeds 0 1 2 --output FOLDER -- --max_steps 400

The recipe's model takes the place of the base model; its data, vocabulary, budgets and optimisation are those of every
row. A row changes it as the paper's row changes the paper's base. What Table 3 counts (layers, d_model, d_ff, heads,
d_k, d_v) is multiplied by the same factor: C-ff4096 doubles d_ff, and A-h1 has an eighth of the heads, each eight
times as wide. Dropout, label smoothing and the kind of positions are the paper's own; big takes three times as many
updates. Where the recipe leaves the base model as it is, the rows are the paper's.

Each row is trained in FOLDER/ROW/seed-SEED. The same command goes on with what was interrupted and passes over what is
finished; started on several devices at once, each takes what none of the others is at.
"""

import argparse
import logging
import sys
from fractions import Fraction
from pathlib import Path

from .ablation.experiment import OURS, Ablation
from .ablation.rows import named_rows
from .ablation.table import write_table
from .files import check_output_folder
from .options import positive
from .trainer.arguments import packaged_recipes


# The command


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own arguments, and the words for `hf-vaswani train`."""
    parser = argparse.ArgumentParser(
        prog="hf-vaswani ablate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="recipe: a YAML file, or one of: " + ", ".join(packaged_recipes()))
    parser.add_argument("--output", required=True, help="folder for the runs and the table")
    rows = "names, letters of groups (A: all of A), all: every row but big (%(default)s)"
    parser.add_argument("--rows", nargs="+", default=["all"], help=rows)
    parser.add_argument("--seeds", nargs="+", type=int, help="train each row once with each (the recipe's)")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1), help="of the widths of the recipe's model (1)")
    last = "evaluate the mean of so many last checkpoints; the paper's Table 3 averages none: 1 (%(default)s)"
    parser.add_argument("--average-last", type=positive, default=5, help=last)
    parser.add_argument("--table-only", action="store_true", help="draw the table of what is finished, train nothing")
    parser.usage = parser.format_usage().removeprefix("usage: ").strip() + " [-- more fields of hf-vaswani train]"
    end = argv.index("--") if "--" in argv else len(argv)
    args, words = parser.parse_args(argv[:end]), argv[end + 1 :]
    if args.config is None and not args.table_only:
        parser.error("--config is needed to train")
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in OURS:
            parser.error(f"{word} after --: ablate sets it itself")
    return args, ([] if args.config is None else ["--config", args.config]) + words


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani ablate`."""
    args, words = _parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    check_output_folder(args.output)
    folder = Path(args.output)
    if not args.table_only:
        rows = named_rows(args.rows)
        ablation = Ablation(words, folder, args.scale, args.average_last)
        for row in rows:
            ablation.words_of(row, ablation.seed)  # now, rather than after hours: whether there can be such a row
        ablation.prepare()
        for seed in args.seeds or [ablation.seed]:
            for row in rows:
                if ablation.run(row, seed):
                    write_table(folder)
    print(write_table(folder))


if __name__ == "__main__":
    main()
