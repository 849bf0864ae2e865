"""Train and evaluate rows of Table 3 under the same conditions."""

import json
import logging
import math
import time
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from filelock import FileLock
from tqdm import tqdm

from hf_vaswani import VaswaniConfig
from hf_vaswani.checksums_vaswani import checksum

from ..evaluation.metrics import build_metrics, measure
from ..evaluation.perplexity import perplexities
from ..files import sync, write_whole
from ..inference.loading import load_checkpoint
from ..inference.translation import translate
from ..paper import UPDATES
from ..trainer.arguments import DataArguments, VaswaniTrainingArguments, parse_arguments
from ..trainer.averaging import RECORD
from ..trainer.checkpoints import complete_checkpoints
from ..trainer.cost import cost
from ..trainer.manifest import changes, model_fields, read_manifest
from ..trainer.resumable_trainer import MANIFEST_NAME
from ..trainer.run import make_trainer, train
from ..trainer.run_lock import RunInUseError, lock_run
from ..trainer.trainer import VaswaniTrainer
from .rows import COUNTED, base_config, row_config
from .table import RESULT


logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"


class AblationManifest(TypedDict):
    """Fields of an ablation's `run.json`."""

    must_match: dict[str, Any]


class Ablation:
    """Runs of Table 3's rows in one folder, trained under the same conditions.

    Args:
        argv (`list[str]`): Command line for `hf-vaswani train`: the recipe and its overrides.
        folder (`Path`): Folder for the vocabulary, the runs and the table.
        scale (`Fraction`): Factor on the widths of the recipe's model.
        average_last (`int`): Number of final checkpoints whose mean is evaluated.

    Raises:
        ValueError: The recipe does not allow a comparison of rows.
    """

    def __init__(self, argv: list[str], folder: Path, scale: Fraction = Fraction(1), average_last: int = 5):
        self.argv, self.folder, self.average_last = argv, folder, average_last
        model_args, data, args = parse_arguments(argv)
        self.base, self.max_steps, self.seed = base_config(model_args, scale), args.max_steps, args.seed
        _check_recipe(data, args)

    def prepare(self) -> None:
        """Learn the vocabulary and tokenise the data, once for all runs.

        Raises:
            ValueError: The folder has runs of another recipe.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        vocabulary = self.folder / TOKENIZER
        with FileLock(self.folder / "prepare.lock"), TemporaryDirectory(dir=self.folder) as scratch:
            reuse = ["--tokenizer_from", str(vocabulary)] if vocabulary.is_dir() else []
            arguments = parse_arguments([*self.argv, *self._model_argv("base"), *reuse, "--output_dir", scratch])
            trainer = make_trainer(*arguments, None)
            self._check_same(self._record(trainer, arguments[1]))
            if not reuse:
                tokenizer = Path(scratch) / TOKENIZER
                trainer.processing_class.save_pretrained(tokenizer)
                sync(tokenizer)
                tokenizer.rename(vocabulary)

    def _record(self, trainer: VaswaniTrainer, data: DataArguments) -> dict:
        """Training and evaluation settings that all runs must share for their results to be comparable."""
        must_match, args = dict(trainer.manifest["must_match"]), trainer.args
        del must_match["seed"]
        must_match |= {
            "max_steps": args.max_steps,
            "average_last": self.average_last,
            "bleu_tokenize": args.bleu_tokenize,
        }
        must_match |= {f"eval_files[{i}]": checksum(Path(file)) for i, file in enumerate(data.eval_files)}
        return {"must_match": must_match | ({"eval_split": data.eval_split} if data.dataset_name else {})}

    def _check_same(self, record: dict) -> None:
        path = self.folder / MANIFEST_NAME
        if not path.is_file():
            write_whole(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
            return
        earlier = read_manifest(path, AblationManifest)
        if changed := changes(earlier["must_match"], record["must_match"]):
            raise ValueError(
                f"{self.folder} has rows of another recipe, choose another --output: {', '.join(changed)}."
            )

    def _model_argv(self, row: str) -> list[str]:
        """Command-line arguments that select a row's model, overriding the recipe's."""
        fields, paper = model_fields(row_config(self.base, row)), model_fields(VaswaniConfig.from_table3(row))
        overrides = {n: v for n, v in fields.items() if v != paper[n] or n in ("d_k", "d_v")}
        return ["--model", row, "--model_overrides", json.dumps(overrides, allow_nan=False)]

    def words_of(self, row: str, seed: int) -> list[str]:
        """Command line of `hf-vaswani train` for a row and a seed."""
        run = self.folder / row / f"seed-{seed}"
        steps = self.max_steps * UPDATES.get(row, UPDATES["base"]) // UPDATES["base"]
        argv = [*self.argv, *self._model_argv(row), "--output_dir", str(run), "--seed", str(seed)]
        argv += ["--max_steps", str(steps), "--tokenizer_from", str(self.folder / TOKENIZER)]
        argv += ["--average", "last", "--average_count", str(self.average_last)]
        return [*argv, "--resume", str(bool(complete_checkpoints(run))).lower()]

    def run(self, row: str, seed: int) -> bool:
        """Train and evaluate a row with a seed, unless another process has claimed the run.

        Returns:
            True if the run is finished, now or earlier; False if another process has claimed it.
        """
        run = self.folder / row / f"seed-{seed}"
        try:
            with lock_run(run):
                if (run / RESULT).is_file():
                    logger.info("%s: finished earlier.", run)
                    return True
                differs = self.differences(row)
                logger.info("%s: %s.", run, ", ".join(f"{name} {value}" for name, value in differs.items()))
                trainer = train(*parse_arguments(self.words_of(row, seed)))
                result = {"row": row, "seed": seed, "differs": differs, **training_cost(trainer), **evaluate(trainer)}
                write_whole(run / RESULT, json.dumps(result, indent=2, allow_nan=False) + "\n")
                return True
        except RunInUseError as error:
            logger.info("%s", error)
            return False

    def differences(self, row: str) -> dict:
        """Fields in which a row differs from base; for base itself, its values of all fields that rows vary."""
        fields, base = model_fields(row_config(self.base, row)), model_fields(self.base)
        if row == "base":
            return {name: base[name] for name in (*COUNTED, "dropout", "label_smoothing", "position_embedding")}
        return {name: value for name, value in fields.items() if value != base[name]}


def _check_recipe(data: DataArguments, args: VaswaniTrainingArguments) -> None:
    """Raise ValueError for a recipe that does not allow a comparison of rows."""
    if not (data.eval_files or data.dataset_name):
        raise ValueError("No evaluation data to compare the rows on: set eval_files or dataset_name.")
    if args.max_steps < 1:
        raise ValueError("num_train_epochs: all rows train for the same number of updates; set max_steps instead.")
    if args.early_stopping_patience is not None:
        raise ValueError("early_stopping_patience: all rows train for the same number of updates, max_steps.")
    if args.world_size > 1:
        raise ValueError(
            f"Expected one process, found {args.world_size}: a row trains on one device. Start the command once for "
            "each device (CUDA_VISIBLE_DEVICES=0 hf-vaswani ablate ...): each process claims an unclaimed row."
        )
    _bleu(args)  # raises for an unknown tokenisation


def _bleu(args: VaswaniTrainingArguments) -> dict:
    return build_metrics(("bleu",), (args.bleu_tokenize,), warn=False)


def evaluate(trainer: VaswaniTrainer) -> dict:
    """Perplexity and BLEU of the averaged weights on the evaluation data, with the search of section 6.1.

    Args:
        trainer (`VaswaniTrainer`): Trainer after training with `average=last`.

    Raises:
        ValueError: The perplexity is infinite or NaN.
    """
    started, args, pairs = time.monotonic(), trainer.args, trainer.eval_dataset
    folder = Path(args.output_dir) / "average-last"
    model, tokenizer = load_checkpoint(str(folder))
    sources, references = pairs["source"][:], [pairs["target"][:]]
    budget = args.eval_tokens_per_device
    per_token, _ = perplexities(model, tokenizer, sources, references, batch_tokens=budget)
    if not math.isfinite(per_token.score):
        raise ValueError(f"{folder}: the perplexity is {per_token.score}, {per_token.note}")
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
    """Updates, tokens and seconds of a training run; `None` for unknown values."""
    without_embeddings = trainer.model.num_parameters(exclude_embeddings=True)
    spent = cost(vars(trainer.state), without_embeddings, trainer.args.world_size)
    names = ("updates", "source_tokens", "target_tokens", "seconds")
    return {name: getattr(spent, name) for name in names}
