"""Train rows of the paper's Table 3 at any scale, and write a table of the results next to the paper's.

    hf-vaswani ablate --config RECIPE --rows base A D --seeds 0 1 2 --output FOLDER -- --max_steps 400

The model of the recipe is the base model. All rows share the data, vocabulary, budgets and optimisation of the recipe.
A row changes its base model as the paper's row changes the paper's. Sizes (layers, d_model, d_ff, heads, d_k, d_v) are
multiplied by the same factor: C-ff4096 doubles d_ff, and A-h1 has an eighth of the heads, each eight times as wide.
Dropout, label smoothing and the kind of positions have the values of the paper. The row big takes three times as many
updates. If the recipe does not modify the base model, the rows are exactly those of the paper.

Each row is trained in FOLDER/ROW/seed-SEED. Repeating the command resumes interrupted runs and skips finished ones.
Several processes may run the same command at once, for example one per device: each claims an unclaimed run.
"""

import argparse
import logging
import sys
from fractions import Fraction
from pathlib import Path

from .files import check_output_folder
from .options import Parser, positive
from .running import naming_resumption, run
from .trainer.command_line import UsageError, parse_values
from .trainer.packaged_recipes import packaged_recipes


# Arguments of `hf-vaswani train` that this command sets itself.
OURS = ("model", "output_dir", "seed", "resume", "average", "average_count", "tokenizer_from", "config")


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani ablate`."""
    parser = Parser(
        prog="hf-vaswani ablate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="recipe: a YAML file, or one of " + ", ".join(packaged_recipes()))
    parser.add_argument("--output", required=True, help="folder for the runs and the table")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["all"],
        help="names of rows, letters of groups (A is all rows of group A), or all for every row except big "
        "(default: all)",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="random seeds; each row is trained once per seed (default: the recipe's)"
    )
    parser.add_argument(
        "--scale",
        type=Fraction,
        default=Fraction(1),
        help="factor for all widths of the recipe's model, such as 1/4 (default: 1)",
    )
    parser.add_argument(
        "--average-last",
        type=positive,
        default=5,
        help="number of last checkpoints whose average is evaluated; 1 evaluates without averaging, as in the paper's "
        "Table 3 (default: %(default)s)",
    )
    parser.add_argument(
        "--table-only", action="store_true", help="write the table of the finished runs without training"
    )
    parser.usage = parser.format_usage().removeprefix("usage: ").strip() + " [-- more fields of hf-vaswani train]"
    return parser


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into the arguments of this command and the argument list of `hf-vaswani train`."""
    parser = make_parser()
    end = argv.index("--") if "--" in argv else len(argv)
    args, train_argv = parser.parse_args(argv[:end]), argv[end + 1 :]
    check_output_folder(args.output)
    if args.config is None and not args.table_only:
        parser.error("training needs --config")
    for argument in train_argv:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in OURS:
            parser.error(f"{argument} after --: ablate sets it itself")
    train_argv = ([] if args.config is None else ["--config", args.config]) + train_argv
    try:
        parse_values(train_argv)
    except UsageError as error:
        parser.error(f"after --: {error}")
    return args, train_argv


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani ablate`."""
    args, train_argv = parse_arguments(sys.argv[1:] if argv is None else argv)
    check_output_folder(args.output)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    folder = Path(args.output)

    from .ablation.experiment import Ablation
    from .ablation.rows import named_rows
    from .ablation.table import write_table

    # After the imports, whose notices are not for the user.
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    if not args.table_only:
        rows = named_rows(args.rows)
        ablation = Ablation(train_argv, folder, args.scale, args.average_last)
        for row in rows:
            ablation.words_of(row, ablation.seed)  # raises for an impossible row before hours of training
        with naming_resumption(lambda: "The same command continues."):
            ablation.prepare()
            for seed in args.seeds or [ablation.seed]:
                for row in rows:
                    if ablation.run(row, seed):
                        write_table(folder)
    print(write_table(folder))


if __name__ == "__main__":
    sys.exit(run("ablate"))
