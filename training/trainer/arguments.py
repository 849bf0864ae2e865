"""Training arguments, from a recipe and the command line.

A recipe is a flat YAML file whose keys are the fields of the three classes below. `--config` names it, by path or as
one of the recipes in the package. Every field is also a command-line option, which takes precedence.
"""

import json
import math
import os
import re
import reprlib
import sys
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..data.readers import check_file
from .packaged_recipes import RECIPES, packaged_recipes


MAX_RECIPE = 2**20  # bytes


def check_values(arguments) -> None:
    """Raise ValueError for a number that is not finite or too large, a null byte, or malformed JSON."""
    for item in (item for item in fields(arguments) if item.init):
        name, value = item.name, getattr(arguments, item.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}.")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} must be below 2**63, got a number of {len(f'{value:x}')} hexadecimal digits.")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\0" in text:
                raise ValueError(f"{name} holds a null byte: {text!r:.60}.")
        if isinstance(value, str) and value.startswith("{") and "dict" in str(get_type_hints(type(arguments))[name]):
            try:
                json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}: expected a mapping, as JSON: {error}, found {value!r:.60}.") from error


def check_positive(arguments, *names: str) -> None:
    """Raise ValueError for a field that is neither `None` nor positive."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}.")


@dataclass
class ModelArguments:
    """Model, vocabulary and initial weights."""

    model: str = field(default="base", metadata={"help": "Row of Table 3: base, big, A-h1, B-dk16, C-N2, ..."})
    model_overrides: str | None = field(
        default=None, metadata={"help": 'Fields of VaswaniConfig that replace those of the row, as {"d_model": 128}.'}
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Attention implementation: eager, sdpa, flex_attention or flash_attention_2. By default, "
            "transformers chooses."
        },
    )
    vocab_size: int = field(default=37000, metadata={"help": "Size of the joint BPE vocabulary (section 5.1)."})
    tokenizer_from: str | None = field(
        default=None, metadata={"help": "Folder of a tokenizer to use instead of learning a vocabulary."}
    )
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "Model to fine-tune, a folder or a repository on the Hub. Its weights, vocabulary and search "
            "settings are used; model and model_overrides may change its dropout and label_smoothing only."
        },
    )
    extend_vocabulary: int | None = field(
        default=None,
        metadata={"help": "With init_from: maximum number of tokens to add, learned from the training pairs."},
    )
    lora_rank: int | None = field(
        default=None,
        metadata={"help": "With init_from: train low-rank adapters of this rank only, and merge them at the end."},
    )

    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run the Python code of a custom tokenizer, which is refused by default."},
    )

    def __post_init__(self):
        check_values(self)
        check_positive(self, "extend_vocabulary", "lora_rank")
        for name in ("extend_vocabulary", "lora_rank"):
            value = getattr(self, name)
            if value is not None and self.init_from is None:
                raise ValueError(f"{name}={value} needs init_from, the model to start from.")
        if self.tokenizer_from is not None and self.init_from is not None:
            raise ValueError("tokenizer_from and init_from: the model to fine-tune already has a vocabulary.")
        if self.lora_rank is not None and self.extend_vocabulary is not None:
            raise ValueError(
                "lora_rank and extend_vocabulary: adapters alone cannot learn the new tokens' embeddings."
            )


@dataclass
class DataArguments:
    """Training and evaluation data. Paths may contain environment variables."""

    source_lang: str = field(default="en", metadata={"help": "Language code of the source side."})
    target_lang: str = field(default="de", metadata={"help": "Language code of the target side."})
    train_files: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Training pairs: two parallel text files, or one .tsv, .jsonl or .parquet file. All but .parquet "
            "may be compressed (.gz).",
            "aliases": ["--train_file", "--train-file"],
        },
    )
    eval_files: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Evaluation pairs, in the formats of train_files.",
            "aliases": ["--eval_file", "--eval-file"],
        },
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of files."})
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the data set, as de-en of wmt14."}
    )
    train_split: str = field(default="train", metadata={"help": "Training split of the data set."})
    eval_split: str = field(default="validation", metadata={"help": "Evaluation split of the data set."})
    drop_empty: bool = field(
        default=False, metadata={"help": "Drop and count pairs with an empty side. By default, they are an error."}
    )
    max_length: int = field(
        default=256, metadata={"help": "Maximum tokens of a side; longer training pairs are dropped and counted."}
    )
    max_length_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Maximum ratio of the sides' lengths in tokens; other training pairs are dropped and counted."
        },
    )
    num_proc: int | None = field(default=None, metadata={"help": "Number of processes for tokenisation."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Stream the training pairs, without a copy on disk or a delay at the start."},
    )
    stream_window: int = field(
        default=100_000,
        metadata={
            "help": "Pairs of a stream that are read ahead to form batches; the vocabulary is learned from the first "
            "window."
        },
    )

    def __post_init__(self):
        check_values(self)
        check_positive(self, "max_length", "max_length_ratio", "num_proc", "stream_window")


METRICS = {"eval_loss": False, "eval_perplexity": False, "eval_bleu": True}  # True: higher is better


@dataclass
class VaswaniTrainingArguments(Seq2SeqTrainingArguments):
    """transformers' arguments with the paper's defaults (sections 5.1 to 5.4), token budgets and averaging."""

    output_dir: str = field(default="runs/vaswani", metadata={"help": "Folder for checkpoints and logs."})
    resume: bool = field(default=False, metadata={"help": "Resume from the last complete checkpoint."})

    source_tokens_per_update: int = field(
        default=25000, metadata={"help": "Source tokens per update over all devices, padding included."}
    )
    target_tokens_per_update: int = field(
        default=25000, metadata={"help": "Target tokens per update over all devices, padding included."}
    )
    tokens_per_device: int | None = field(
        default=None,
        metadata={
            "help": "Maximum tokens per side in one batch on one device. Gradients are accumulated over as many "
            "batches as an update needs. By default, gradient_accumulation_steps sets their number."
        },
    )
    eval_tokens_per_device: int = field(
        default=2048, metadata={"help": "Maximum tokens per side in one evaluation batch on one device."}
    )
    eval_bleu: bool = field(default=True, metadata={"help": "Translate the evaluation set and report BLEU."})
    bleu_tokenize: str = field(
        default="13a",
        metadata={"help": "sacreBLEU tokenisation for eval_bleu: 13a for raw text, none for tokenised text."},
    )
    save_minutes: float | None = field(
        default=None, metadata={"help": "Interval of additional checkpoints in minutes (10 in the paper)."}
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Number of consecutive evaluations without improvement of metric_for_best_model after which "
            "training stops. Evaluations during the warm-up do not count."
        },
    )

    average: str | None = field(
        default=None,
        metadata={
            "help": "Average of the weights to write at the end: last (the mean of the last checkpoints, as in "
            "section 6.1), best (the mean of the best checkpoints by metric_for_best_model), or ema (an exponential "
            "moving average, which is also saved in each checkpoint)."
        },
    )
    average_count: int = field(
        default=5,
        metadata={"help": "Number of checkpoints in the average. They are kept even if save_total_limit is lower."},
    )
    ema_decay: float = field(
        default=0.999,
        metadata={
            "help": "Decay of the exponential moving average, which covers about the last 1 / (1 - ema_decay) updates."
        },
    )
    eval_average: bool = field(
        default=False,
        metadata={"help": "With average=ema or last: evaluate the average instead of the current weights."},
    )

    # Section 5.3. The peak of the paper's schedule follows from the model: (d_model * warmup) ** -0.5.
    optim: str = field(
        default="adamw_torch_fused", metadata={"help": "Optimiser. The default is Adam, as weight decay is 0."}
    )
    adam_beta1: float = field(default=0.9)
    adam_beta2: float = field(default=0.98)
    adam_epsilon: float = field(default=1e-9)
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Maximum norm of the gradient; 0 for no clipping, as in the paper."}
    )
    lr_scheduler_type: str = field(default="inverse_sqrt")
    warmup_steps: float = field(default=4000)
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate; by default, the paper's (section 5.3)."}
    )
    max_steps: int | None = field(
        default=None, metadata={"help": "Number of updates; 100,000 unless num_train_epochs is given."}
    )
    num_train_epochs: float | None = field(default=None, metadata={"help": "Number of epochs, instead of max_steps."})

    logging_steps: float = field(default=100)
    eval_strategy: IntervalStrategy | str = field(default="steps")
    eval_steps: float | None = field(default=1000)
    save_strategy: SaveStrategy | str = field(default="steps")
    save_steps: float = field(default=1000)
    save_total_limit: int | None = field(default=20)
    metric_for_best_model: str | None = field(default="eval_bleu")
    report_to: None | str | list[str] = field(default="tensorboard")  # noqa: RUF036, HfArgumentParser takes this order alone
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Search for parameters without gradients. The model has none, and the search takes time."},
    )
    use_cache: bool = field(
        default=True, metadata={"help": "Value of use_cache in saved checkpoints; training does not use a cache."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Omit NaN and infinite losses from the logged mean."}
    )

    def __post_init__(self):
        check_values(self)
        # bf16 without an accelerator requires use_cpu.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.max_steps is None:
            self.max_steps = 100_000 if self.num_train_epochs is None else -1
        if self.num_train_epochs is None:
            self.num_train_epochs = 1.0  # max_steps takes precedence
        if not self.eval_bleu and self.best_metric == "eval_bleu":
            self.metric_for_best_model = "eval_loss"
        if self.greater_is_better is None:  # transformers would prefer higher perplexity
            self.greater_is_better = METRICS.get(self.best_metric)
        try:
            super().__post_init__()
        except ValueError as error:  # names the field already
            raise ValueError(str(error)) from error
        except (TypeError, KeyError, AttributeError, OverflowError) as error:  # a value of the wrong type
            raise ValueError(f"transformers' TrainingArguments: {type(error).__name__}: {error}") from error
        self._check()
        if self.tokens_per_device is not None:
            self.set_accumulation()

    def __getstate__(self) -> dict:
        """State to pickle, as `training_args.bin` in every checkpoint, without secret tokens."""
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}

    def _check(self) -> None:
        """Raise ValueError for values that are invalid or would be ignored."""
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor}: the model smooths its own loss, in training "
                "only. Set label_smoothing in the model: --model_overrides '{\"label_smoothing\": 0.1}'."
            )
        check_positive(self, "source_tokens_per_update", "target_tokens_per_update", "tokens_per_device")
        check_positive(self, "eval_tokens_per_device", "num_train_epochs", "save_minutes", "early_stopping_patience")
        if self.max_steps != -1:  # -1: num_train_epochs decides
            check_positive(self, "max_steps")
        for name in ("seed", "data_seed"):
            if not 0 <= (getattr(self, name) or 0) < 2**32:
                raise ValueError(f"{name} must be at least 0 and below 2**32, got {getattr(self, name)}.")
        if self.learning_rate is not None and self.learning_rate < 0:
            raise ValueError(f"learning_rate must not be negative, got {self.learning_rate}.")
        if self.deepspeed_plugin is not None and self.deepspeed_plugin.zero_stage == 3:
            raise ValueError(
                "DeepSpeed, zero_stage 3: in evaluation each device translates different sentences, which requires "
                "all weights on each device. Use zero_stage 2, or FSDP2."
            )
        if self.learning_rate is None and self.lr_scheduler_type == "inverse_sqrt" and self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}: without a warm-up, the peak learning_rate must be given."
            )
        for name, default in (
            ("per_device_train_batch_size", 8),
            ("per_device_eval_batch_size", 8),
            ("train_sampling_strategy", "random"),
            ("auto_find_batch_size", False),
            ("dataloader_drop_last", False),
        ):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect: batches are formed by length and by "
                    "source_tokens_per_update, target_tokens_per_update and tokens_per_device."
                )
        if self.resume_from_checkpoint is not None:
            raise ValueError(
                f"resume_from_checkpoint={self.resume_from_checkpoint} has no effect: --resume continues from the "
                "last complete checkpoint in output_dir."
            )
        if self.enable_jit_checkpoint:
            raise ValueError(
                "enable_jit_checkpoint is redundant: on SIGTERM, `hf-vaswani train` finishes the update and writes a "
                "checkpoint."
            )
        if self.best_metric is not None and self.best_metric not in METRICS:
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model}: expected one of {', '.join(METRICS)}."
            )
        self._check_average()
        by_steps = self.save_strategy == self.eval_strategy == "steps" and self.metric_for_best_model is not None
        if by_steps and self.eval_steps >= 1 and self.eval_steps % self.save_steps:
            raise ValueError(
                f"eval_steps={self.eval_steps} must be a multiple of save_steps={self.save_steps}: the best "
                "checkpoint can be kept only if it is saved when it is evaluated."
            )

    def _check_average(self) -> None:
        """Raise ValueError for an average that other arguments rule out."""
        if self.average not in (None, "last", "best", "ema"):
            raise ValueError(f"average must be last, best or ema, got {self.average!r}.")
        check_positive(self, "average_count")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), got {self.ema_decay}.")
        if self.eval_average and self.average not in ("ema", "last"):
            raise ValueError(
                f"eval_average needs average=ema or last, got average={self.average}: the best checkpoints are "
                "selected by the scores of their own weights."
            )
        if self.eval_average and self.load_best_model_at_end:
            raise ValueError(
                "eval_average with load_best_model_at_end: evaluation scores the average, not the weights that would "
                "be loaded."
            )
        if self.average == "last" and self.save_strategy == "no" and self.save_minutes is None:
            raise ValueError("average=last needs checkpoints, but save_strategy is no.")
        if self.average == "best" and (self.eval_strategy == "no" or self.metric_for_best_model is None):
            raise ValueError("average=best needs evaluation while training, and metric_for_best_model.")
        if self.average == "best" and self.save_strategy not in (self.eval_strategy, "best"):
            raise ValueError(
                f"average=best needs a checkpoint at each evaluation: save_strategy is {self.save_strategy.value}, "
                f"eval_strategy is {self.eval_strategy.value}."
            )

    @property
    def best_metric(self) -> str | None:
        """Metric that selects the best checkpoint, by its name in the log."""
        metric = self.metric_for_best_model
        return metric if metric is None or metric.startswith("eval_") else f"eval_{metric}"

    def set_accumulation(self) -> None:
        """Derive `gradient_accumulation_steps` from the token budgets and the number of devices.

        Raises:
            ValueError: A different `gradient_accumulation_steps` is given.
        """
        largest = max(self.source_tokens_per_update, self.target_tokens_per_update)
        batches = -(-largest // (self.tokens_per_device * self.world_size))
        if self.gradient_accumulation_steps not in (1, batches):
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, but tokens_per_device="
                f"{self.tokens_per_device} makes it {batches}: give one of them."
            )
        self.gradient_accumulation_steps = batches

    @property
    def parts_per_update(self) -> int:
        """Batches per update, over devices and accumulation steps."""
        return self.world_size * self.gradient_accumulation_steps


GROUPS = (ModelArguments, DataArguments, VaswaniTrainingArguments)


def load_recipe(name: str) -> dict:
    """Read a recipe as a mapping from fields to text, lists of text, or mappings.

    Args:
        name (`str`): Path of a YAML file, or name of a packaged recipe.

    Raises:
        FileNotFoundError: Neither a file nor a packaged recipe.
        ValueError: Not a YAML mapping, or an unknown field.
    """
    path = Path(name)
    if name in packaged_recipes() and not path.is_file():
        path = RECIPES / f"{name}.yaml"
    else:
        _check_recipe_file(name)
    try:
        recipe = _read_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path}: not YAML: byte 0x{byte:02x} at position {error.start} is not UTF-8.") from error
    # HfArgumentParser modifies the types in the fields themselves.
    known = {name: str(kind) for cls in GROUPS for name, kind in get_type_hints(cls).items()}
    for key, value in recipe.items():
        if key not in known:
            raise ValueError(f"{path}: unknown field {key!r:.60}.{_suggestion(str(key), list(known))}")
        _check_kind(known[key], value, f"{path}: {key}")
    return recipe


def _check_recipe_file(name: str) -> None:
    """Raise OSError for a missing file, and ValueError for one that is too large."""
    try:
        check_file(name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"--config {name}: no such file, and no recipe of that name. Recipes: {', '.join(packaged_recipes())}."
        ) from None
    if (size := Path(name).stat().st_size) > MAX_RECIPE:
        raise ValueError(f"{name}: {size:,} bytes; a recipe has at most {MAX_RECIPE:,}.")


def _check_kind(kind: str, value, place: str) -> None:
    """Raise ValueError for a list or mapping that the field's type does not allow, and for nested values in a list."""
    if isinstance(value, list):
        if "list" not in kind:
            raise ValueError(f"{place}: expected one value, found a list of {len(value)}.")
        for item in value:
            if not isinstance(item, str) or item.startswith("-"):
                raise ValueError(f"{place}: expected a list of names, found {reprlib.repr(item)} in it.")
    elif isinstance(value, dict) and not ("dict" in kind or place.endswith(": model_overrides")):
        raise ValueError(f"{place}: expected a value, found a mapping.")


def _suggestion(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


class _Loader(yaml.BaseLoader):
    """YAML loader that refuses aliases, which can expand a few lines beyond any memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def _read_yaml(text: str, place: str) -> dict:
    """Read a YAML mapping with its scalars as text; the fields' types interpret them (`no` may be Norwegian)."""
    try:
        mapping = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(mapping, dict):
        raise ValueError(f"{place}: expected 'field: value' lines, found {type(mapping).__name__}.")
    return mapping


def _typed(text: str):
    """Parse a scalar as a number, truth value or text by YAML 1.2, in which 5e-3 is a number.

    Raises:
        ValueError: A list, a mapping, an invalid date, or a number of too many digits.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected one value, found {reprlib.repr(text)}")
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected a number, a truth value or text, found {text!r:.60}") from error


def _recipe_argv(recipe: dict) -> list[str]:
    """Command-line arguments equivalent to a recipe, for a single parser of both."""
    argv = []
    for name, value in recipe.items():
        if isinstance(value, list):
            argv += [f"--{name}", *value]
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps(value)}")
        elif value not in ("", "null", "~"):
            argv.append(f"--{name}={value}")
    return argv


def expand(path: str) -> str:
    """Expand environment variables and `~` in a path.

    Raises:
        ValueError: A variable is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise ValueError(f"{path}: the environment variable {unset[1]} is not set.")
    return expanded


def parse_arguments(argv: list[str] | None = None) -> tuple[ModelArguments, DataArguments, VaswaniTrainingArguments]:
    """Parse a recipe and the command line into the three groups of arguments.

    Args:
        argv (`list[str]`, *optional*): Command-line arguments; `sys.argv[1:]` when not given.

    Raises:
        ValueError: Unknown field, or invalid value.
        FileNotFoundError: No such recipe.
    """
    parser = HfArgumentParser(GROUPS, prog="hf-vaswani train", allow_abbrev=False)
    parser.add_argument("--config", help="Recipe: a YAML file, or one of: " + ", ".join(packaged_recipes()))
    parser.error = _raise
    argv = sys.argv[1:] if argv is None else argv
    config = parser.parse_known_args(argv)[0].config
    recipe_argv = []
    if config is not None:
        recipe = load_recipe(config)
        recipe_argv = _recipe_argv(recipe)
        try:
            parser.parse_known_args(recipe_argv)
        except ValueError as error:
            raise ValueError(f"{config}: {_short(error)}") from error
        parser.set_defaults(**{name: None for name, value in recipe.items() if value in ("null", "~")})
    try:
        model, data, training, _, unknown = parser.parse_args_into_dataclasses(
            [*recipe_argv, *argv], return_remaining_strings=True
        )
    except ValueError as error:
        raise ValueError(f"{_short(error)}{_recipe_suffix(config)}") from error
    if unknown:
        known = [f"--{f.name}" for cls in GROUPS for f in fields(cls)]
        name = unknown[0].partition("=")[0]  # the value may be a secret
        raise ValueError(f"unknown argument {name}.{_suggestion(name, known)}")
    data.train_files = [expand(path) for path in data.train_files or []]
    data.eval_files = [expand(path) for path in data.eval_files or []]
    for name in ("init_from", "tokenizer_from"):
        if getattr(model, name) is not None:
            setattr(model, name, expand(getattr(model, name)))
    if isinstance(model.model_overrides, str):
        try:
            overrides = _read_yaml(model.model_overrides, f"model_overrides {model.model_overrides!r:.200}")
            model.model_overrides = {name: _override(name, value) for name, value in overrides.items()}
        except ValueError as error:
            raise ValueError(f"{error}{_recipe_suffix(config)}") from error
    return model, data, training


def _override(name: str, value):
    try:
        return _typed(value)
    except ValueError as error:
        raise ValueError(f"model_overrides, {name:.60}: {_short(error)}.") from error


def _short(error: Exception) -> str:
    """The message on one line, cut to 500 characters."""
    return f"{' '.join(str(error).split()):.500}"


def _recipe_suffix(config: str | None) -> str:
    return "" if config is None else f" (recipe: {config})"


def _raise(message: str) -> NoReturn:
    """Error handler of the parser, which by default prints 200 options and exits."""
    raise ValueError(message)


def defaults() -> dict:
    """Default value of each field of a recipe."""
    all_fields = [field for group in GROUPS for field in fields(group)]
    return {f.name: f.default if f.default is not MISSING else f.default_factory() for f in all_fields if f.init}
