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
import json
import logging
import sys
import time
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout
from huggingface_hub.errors import StrictDataclassError
from tqdm import tqdm

from hf_vaswani import TABLE_3, VaswaniConfig
from hf_vaswani.checksums_vaswani import checksum

from .ablation_table import RESULT, write_table
from .arguments import DataArguments, ModelArguments, VaswaniTrainingArguments, packaged_recipes, parse_arguments
from .average import RECORD
from .checkpoints import complete_checkpoints, sync
from .metrics import build_metrics, measure
from .output import write_whole
from .perplexity import perplexities
from .run_facts import UPDATES, cost
from .run_record import changes, model_fields
from .safe_trainer import RECORD_NAME
from .train import make_trainer, train
from .trainer import VaswaniTrainer
from .translate import load_checkpoint, positive, translate


logger = logging.getLogger(__name__)

WIDTHS = ("d_model", "d_ff", "d_k", "d_v")
COUNTED = ("encoder_layers", "decoder_layers", "num_heads", *WIDTHS)
TOKENIZER = "tokenizer"
# What `hf-vaswani train` is told of each run by this command.
OURS = ("model", "output_dir", "seed", "resume", "average", "average_count", "tokenizer_from", "config")


# The rows


def named_rows(names: list[str]) -> list[str]:
    """Rows of Table 3, in its order: by their names, by the letter of a group, or `all` of them but big.

    Raises:
        ValueError: No such row.

    >>> named_rows(["E", "B-dk16", "base"])
    ['base', 'B-dk16', 'E-learned']
    """
    chosen = set()
    for name in names:
        found = [row for row in TABLE_3 if name in (row, row.partition("-")[0]) or (name == "all" and row != "big")]
        if not found:
            raise ValueError(f"--rows {name}: Table 3 has all, A, B, C, D, E, {', '.join(TABLE_3)}.")
        chosen.update(found)
    return [row for row in TABLE_3 if row in chosen]


def base_config(model_args: ModelArguments, scale: Fraction = Fraction(1)) -> VaswaniConfig:
    """The model that takes the place of the base model: the recipe's, with its widths times `scale`.

    Raises:
        ValueError: The recipe's model is not the base model with overrides, or a width would not be whole.
    """
    if model_args.model != "base" or model_args.init_from:
        name, value = ("init_from", model_args.init_from) if model_args.init_from else ("model", model_args.model)
        raise ValueError(f"{name}={value}: the rows of Table 3 are changes of a fresh base model (model: base).")
    overrides = model_args.model_overrides or {}
    try:
        fields = model_fields(VaswaniConfig.from_table3("base", **overrides))
        return VaswaniConfig(**fields | {name: _whole(fields[name], scale, "base", name) for name in WIDTHS})
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"model_overrides {overrides}, --scale {scale}: {' '.join(str(error).split())}") from error


def row_config(base: VaswaniConfig, row: str) -> VaswaniConfig:
    """What a row of Table 3 is for another base model.

    Args:
        base (`VaswaniConfig`): Takes the place of the paper's base model.
        row (`str`): A key of `TABLE_3`.

    Raises:
        ValueError: A number would not be whole, or the row would be the base model once more.

    >>> row_config(VaswaniConfig(d_model=128, d_ff=512, num_heads=8), "C-ff4096").d_ff
    1024
    """
    paper, paper_base = (model_fields(VaswaniConfig.from_table3(name)) for name in (row, "base"))
    fields = model_fields(base)
    changed = {name: value for name, value in paper.items() if value != paper_base[name]}
    for name in changed.keys() & set(COUNTED):
        changed[name] = _whole(fields[name], Fraction(paper[name], paper_base[name]), row, name)
    if row != "base" and changed.items() <= fields.items():
        same = ", ".join(f"{name} {value}" for name, value in changed.items())
        raise ValueError(f"Row {row} would not differ from base, which has {same} already.")
    try:
        return VaswaniConfig(**fields | changed)
    except StrictDataclassError as error:
        raise ValueError(f"Row {row}: {' '.join(str(error).split())}") from error


def _whole(value: int, factor: Fraction, row: str, name: str) -> int:
    scaled = value * factor
    if scaled.denominator != 1:
        raise ValueError(f"Row {row}: {name} would be {value} x {factor} = {scaled}, which is not a whole number.")
    return int(scaled)


# The runs


class Ablation:
    """Rows of Table 3 that are trained alike, in one folder.

    Args:
        words (`list[str]`): Of the command line of `hf-vaswani train`: the recipe, and what differs from it.
        folder (`Path`): Where vocabulary, runs and table go.
        scale (`Fraction`): Of the widths of the recipe's model.
        average_last (`int`): Checkpoints at the end of a run whose mean is evaluated.

    Raises:
        ValueError: The recipe cannot be used for this.
    """

    def __init__(self, words: list[str], folder: Path, scale: Fraction = Fraction(1), average_last: int = 5):
        self.words, self.folder, self.average_last = words, folder, average_last
        model_args, data, args = parse_arguments(words)
        self.base, self.max_steps, self.seed = base_config(model_args, scale), args.max_steps, args.seed
        _check_recipe(data, args)

    def prepare(self) -> None:
        """Learns the vocabulary and tokenises, once for all runs.

        Raises:
            ValueError: The folder has runs of another recipe.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / TOKENIZER
        with FileLock(self.folder / "prepare.lock"), TemporaryDirectory(dir=self.folder) as scratch:
            known = ["--tokenizer_from", str(place)] if place.is_dir() else []
            arguments = parse_arguments([*self.words, *self._model("base"), *known, "--output_dir", scratch])
            trainer = make_trainer(*arguments, None)
            self._check_same(self._record(trainer, arguments[1]))
            if not known:
                tokenizer = Path(scratch) / TOKENIZER
                trainer.processing_class.save_pretrained(tokenizer)
                sync(tokenizer)
                tokenizer.rename(place)

    def _record(self, trainer: VaswaniTrainer, data: DataArguments) -> dict:
        """What makes results comparable: how all runs learn, and how they are evaluated."""
        same, args = dict(trainer.run_record["same"]), trainer.args
        del same["seed"]
        same |= {"max_steps": args.max_steps, "average_last": self.average_last, "bleu_tokenize": args.bleu_tokenize}
        same |= {f"eval_files[{i}]": checksum(Path(file)) for i, file in enumerate(data.eval_files)}
        return {"same": same | ({"eval_split": data.eval_split} if data.dataset_name else {})}

    def _check_same(self, record: dict) -> None:
        path = self.folder / RECORD_NAME
        if not path.is_file():
            write_whole(path, json.dumps(record, indent=2) + "\n")
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if found := changes(earlier["same"], record["same"]):
            raise ValueError(f"{self.folder} has rows of another recipe, choose another --output: {', '.join(found)}.")

    def _model(self, row: str) -> list[str]:
        """Words that say what model a row is, whatever the recipe's is."""
        fields, paper = model_fields(row_config(self.base, row)), model_fields(VaswaniConfig.from_table3(row))
        overrides = {n: v for n, v in fields.items() if v != paper[n] or n in ("d_k", "d_v")}
        return ["--model", row, "--model_overrides", json.dumps(overrides)]

    def words_of(self, row: str, seed: int) -> list[str]:
        """The words for `hf-vaswani train` that make a run."""
        run = self.folder / row / f"seed-{seed}"
        steps = self.max_steps * UPDATES.get(row, UPDATES["base"]) // UPDATES["base"]
        words = [*self.words, *self._model(row), "--output_dir", str(run), "--seed", str(seed)]
        words += ["--max_steps", str(steps), "--tokenizer_from", str(self.folder / TOKENIZER)]
        words += ["--average", "last", "--average_count", str(self.average_last)]
        return [*words, "--resume", str(bool(complete_checkpoints(run))).lower()]

    def run(self, row: str, seed: int) -> bool:
        """Trains and evaluates a row with a seed, unless another command is at it.

        Returns:
            Whether the run is finished; it may have been before.
        """
        run = self.folder / row / f"seed-{seed}"
        run.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(run / "run.lock", blocking=False):
                if (run / RESULT).is_file():
                    logger.info("%s: finished earlier.", run)
                    return True
                differs = self.differences(row)
                logger.info("%s: %s.", run, ", ".join(f"{name} {value}" for name, value in differs.items()))
                trainer = train(*parse_arguments(self.words_of(row, seed)))
                result = {"row": row, "seed": seed, "differs": differs, **training_cost(trainer), **evaluate(trainer)}
                write_whole(run / RESULT, json.dumps(result, indent=2) + "\n")
                return True
        except Timeout:
            logger.info("%s: another command is at it.", run)
            return False

    def differences(self, row: str) -> dict:
        """The fields in which a row differs from base; of base, all those in which rows differ."""
        fields, base = model_fields(row_config(self.base, row)), model_fields(self.base)
        if row == "base":
            return {name: base[name] for name in (*COUNTED, "dropout", "label_smoothing", "position_embedding")}
        return {name: value for name, value in fields.items() if value != base[name]}


def _check_recipe(data: DataArguments, args: VaswaniTrainingArguments) -> None:
    """Raises ValueError for a recipe that rows cannot be compared by."""
    if not (data.eval_files or data.dataset_name):
        raise ValueError("No evaluation data to compare the rows on: set eval_files or dataset_name.")
    if args.max_steps < 1:
        raise ValueError("num_train_epochs: the rows take the same number of updates, set max_steps instead.")
    if args.early_stopping_patience is not None:
        raise ValueError("early_stopping_patience: the rows take the same number of updates, max_steps.")
    if args.world_size > 1:
        raise ValueError(
            f"A row trains on one device, and this is one of {args.world_size} processes. Start the command once for "
            "each device (CUDA_VISIBLE_DEVICES=0 hf-vaswani ablate ...): each takes rows that no other is at."
        )
    _bleu(args)  # its name may be wrong


def _bleu(args: VaswaniTrainingArguments) -> dict:
    return build_metrics(("bleu",), (args.bleu_tokenize,), warn=False)


def evaluate(trainer: VaswaniTrainer) -> dict:
    """Perplexity and BLEU of the averaged weights on the evaluation data, by the search of section 6.1.

    Args:
        trainer (`VaswaniTrainer`): After a training with `average=last`.
    """
    started, args, pairs = time.monotonic(), trainer.args, trainer.eval_dataset
    folder = Path(args.output_dir) / "average-last"
    model, tokenizer = load_checkpoint(str(folder))
    sources, references = pairs["source"][:], [pairs["target"][:]]
    budget = args.eval_tokens_per_device
    per_token, _ = perplexities(model, tokenizer, sources, references, batch_tokens=budget)
    with tqdm(total=len(sources), unit=" sentences", desc="Translating", disable=args.disable_tqdm) as progress:
        translations = translate(model, tokenizer, sources, budget, progress)
    (bleu,) = measure(_bleu(args), translations, references)
    return {
        "parameters": model.num_parameters(),
        "perplexity": per_token.score,
        "bleu": bleu.score,
        "metric": bleu.name,
        "signature": bleu.signature,
        "averaged": len(json.loads((folder / RECORD).read_text(encoding="utf-8"))["checkpoints"]),
        "evaluation_seconds": round(time.monotonic() - started, 1),
    }


def training_cost(trainer: VaswaniTrainer) -> dict:
    """Updates, tokens and seconds of a training; `None` where they are not known."""
    without_embeddings = trainer.model.num_parameters(exclude_embeddings=True)
    spent = cost(vars(trainer.state), without_embeddings, trainer.args.world_size)
    names = ("updates", "source_tokens", "target_tokens", "seconds")
    return {name: getattr(spent, name) for name in names}


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
