"""Rows of Table 3, trained alike and evaluated, in one folder."""

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
from ..files import write_whole
from ..inference.loading import load_checkpoint
from ..inference.translation import translate
from ..paper import UPDATES
from ..trainer.arguments import DataArguments, VaswaniTrainingArguments, parse_arguments
from ..trainer.averaging import RECORD
from ..trainer.checkpoints import complete_checkpoints, sync
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
# What `hf-vaswani train` is told of each run by this command.
OURS = ("model", "output_dir", "seed", "resume", "average", "average_count", "tokenizer_from", "config")


class AblationManifest(TypedDict):
    """Fields of an ablation's `run.json`."""

    must_match: dict[str, Any]


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
        if found := changes(earlier["must_match"], record["must_match"]):
            raise ValueError(f"{self.folder} has rows of another recipe, choose another --output: {', '.join(found)}.")

    def _model(self, row: str) -> list[str]:
        """Words that say what model a row is, whatever the recipe's is."""
        fields, paper = model_fields(row_config(self.base, row)), model_fields(VaswaniConfig.from_table3(row))
        overrides = {n: v for n, v in fields.items() if v != paper[n] or n in ("d_k", "d_v")}
        return ["--model", row, "--model_overrides", json.dumps(overrides, allow_nan=False)]

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

    Raises:
        ValueError: The perplexity is infinite or not a number, which no table can hold.
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
    """Updates, tokens and seconds of a training; `None` where they are not known."""
    without_embeddings = trainer.model.num_parameters(exclude_embeddings=True)
    spent = cost(vars(trainer.state), without_embeddings, trainer.args.world_size)
    names = ("updates", "source_tokens", "target_tokens", "seconds")
    return {name: getattr(spent, name) for name in names}
