"""What a run can be told: the fields of a recipe, which the command line overrides.

A recipe is one flat YAML file whose keys are the fields of the three classes below. It is named by `--config`, as a
path or as the name of a recipe that ships with the package; every field can be given on the command line too, where
it wins: recipe < command line.
"""

import os
import re
import sys
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

import torch
import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments


@dataclass
class ModelArguments:
    """Which model to train."""

    model: str = field(default="base", metadata={"help": "Row of Table 3: base, big, A-h1, B-dk16, C-N2, ..."})
    model_overrides: dict | str | None = field(
        default=None, metadata={"help": 'Fields of VaswaniConfig that differ from the row, as {"d_model": 128}.'}
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "eager, sdpa, flex_attention or flash_attention_2; transformers chooses when not given."},
    )
    vocab_size: int = field(default=37000, metadata={"help": "Entries of the joint BPE vocabulary (section 5.1)."})


@dataclass
class DataArguments:
    """Which sentence pairs to learn from, and which to check on. Paths may hold environment variables."""

    source_lang: str = field(default="en", metadata={"help": "Language code of the source side."})
    target_lang: str = field(default="de", metadata={"help": "Language code of the target side."})
    train_files: list[str] = field(
        default_factory=list,
        metadata={"help": "Two parallel text files, or one .tsv, .jsonl or .parquet file; .gz where it is text."},
    )
    eval_files: list[str] = field(default_factory=list, metadata={"help": "The same, for evaluation while training."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set of the Hub, instead of files."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration, as de-en of wmt14."})
    train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    eval_split: str = field(default="validation", metadata={"help": "Its split to evaluate on."})
    drop_empty: bool = field(
        default=False, metadata={"help": "Drop and count pairs with an empty side; otherwise they are an error."}
    )
    max_length: int = field(
        default=256, metadata={"help": "Training pairs with a side of more tokens are dropped and counted."}
    )
    max_length_ratio: float | None = field(
        default=None, metadata={"help": "Training pairs whose sides differ in tokens by more are dropped and counted."}
    )
    num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read the training pairs as a stream: no copy on disk, no wait for the start."},
    )
    stream_window: int = field(
        default=100_000,
        metadata={"help": "Pairs of a stream that are sorted into batches at a time, and that the vocabulary sees."},
    )


@dataclass
class VaswaniTrainingArguments(Seq2SeqTrainingArguments):
    """transformers' arguments with the paper's defaults (sections 5.1 to 5.4), and what a token budget needs."""

    output_dir: str = field(default="runs/vaswani", metadata={"help": "Where checkpoints and logs go."})
    resume: bool = field(default=False, metadata={"help": "Continue from the last complete checkpoint."})

    source_tokens_per_update: int = field(
        default=25000, metadata={"help": "Source tokens of an update, padding included, over all devices."}
    )
    target_tokens_per_update: int = field(
        default=25000, metadata={"help": "Target tokens of an update, padding included, over all devices."}
    )
    tokens_per_device: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of one side that a device holds at a time, at most. An update is accumulated from as many "
            "parts as that takes on the devices at hand. Not given: gradient_accumulation_steps says how many."
        },
    )
    eval_tokens_per_device: int = field(
        default=2048, metadata={"help": "Tokens of one side of an evaluation batch, per device."}
    )
    eval_bleu: bool = field(default=True, metadata={"help": "Translate the evaluation set and report BLEU."})
    bleu_tokenize: str = field(
        default="13a", metadata={"help": "sacreBLEU tokenisation of eval_bleu: 13a for raw text, none for tokenised."}
    )
    save_minutes: float | None = field(
        default=None, metadata={"help": "Also save a checkpoint every so many minutes (the paper: 10)."}
    )

    # Section 5.3. The peak of the paper's schedule follows from the model: (d_model * warmup) ** -0.5.
    optim: str = field(default="adamw_torch_fused", metadata={"help": "With weight decay 0, this is Adam."})
    adam_beta1: float = field(default=0.9)
    adam_beta2: float = field(default=0.98)
    adam_epsilon: float = field(default=1e-9)
    max_grad_norm: float = field(default=0.0, metadata={"help": "0: no clipping, as in the paper."})
    lr_scheduler_type: str = field(default="inverse_sqrt")
    warmup_steps: float = field(default=4000)
    learning_rate: float | None = field(default=None, metadata={"help": "Peak; the paper's when not given."})
    max_steps: int = field(default=100_000)

    logging_steps: float = field(default=100)
    eval_strategy: str = field(default="steps")
    eval_steps: float | None = field(default=1000)
    save_strategy: str = field(default="steps")
    save_steps: float = field(default=1000)
    save_total_limit: int | None = field(default=20)
    metric_for_best_model: str | None = field(default="eval_bleu")
    report_to: None | str | list[str] = field(default="tensorboard")  # noqa: RUF036, HfArgumentParser takes this order alone
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A NaN must be seen, not averaged away."})

    def __post_init__(self):
        self.use_cpu = (
            self.use_cpu or not torch.accelerator.is_available()
        )  # bf16 without an accelerator needs it said
        super().__post_init__()
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor}: the model smooths its own loss, in training "
                "only. Set label_smoothing in the model: --model_overrides '{\"label_smoothing\": 0.1}'."
            )
        for name in ("source_tokens_per_update", "target_tokens_per_update", "eval_tokens_per_device"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.tokens_per_device is not None:
            self.set_accumulation()

    def set_accumulation(self) -> None:
        """Accumulate as many batches as give the update's tokens on the devices at hand."""
        if self.tokens_per_device < 1:
            raise ValueError(f"tokens_per_device must be positive, got {self.tokens_per_device}.")
        largest = max(self.source_tokens_per_update, self.target_tokens_per_update)
        self.gradient_accumulation_steps = -(-largest // (self.tokens_per_device * self.world_size))

    @property
    def parts_per_update(self) -> int:
        """Batches of an update, over devices and accumulation."""
        return self.world_size * self.gradient_accumulation_steps


def packaged_recipes() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(
        Path(entry.name).stem
        for entry in (resources.files(__package__) / "recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(name: str) -> dict:
    """Read a recipe.

    Args:
        name (`str`): Path of a YAML file, or the name of a packaged recipe.

    Raises:
        FileNotFoundError: Neither a file nor a packaged recipe.
        ValueError: Not a YAML mapping, or a key that is no field.
    """
    path = Path(name)
    if not path.is_file():
        if name not in packaged_recipes():
            raise FileNotFoundError(
                f"--config {name}: no such file, and no recipe of that name. Recipes: {', '.join(packaged_recipes())}."
            )
        path = resources.files(__package__) / "recipes" / f"{name}.yaml"
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: expected 'field: value' lines, found {type(recipe).__name__}.")
    known = [f.name for cls in (ModelArguments, DataArguments, VaswaniTrainingArguments) for f in fields(cls)]
    for key in recipe:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            raise ValueError(f"{path}: unknown field {key!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
    return {key: float(value) if _is_plain_exponent(value) else value for key, value in recipe.items()}


def _is_plain_exponent(value) -> bool:
    """YAML 1.1 reads 5e-3 as a string; people mean the number."""
    return isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) is not None


def expand(path: str) -> str:
    """`path` with environment variables and `~` in place.

    Raises:
        ValueError: A variable is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise ValueError(f"{path}: the environment variable {unset[1]} is not set.")
    return expanded


def parse_arguments(argv: list[str] | None = None) -> tuple[ModelArguments, DataArguments, VaswaniTrainingArguments]:
    """Recipe and command line, as the three groups of arguments.

    Args:
        argv (`list[str]`, *optional*): The words of the command line; those of the process when not given.
    """
    parser = HfArgumentParser((ModelArguments, DataArguments, VaswaniTrainingArguments), prog="hf-vaswani train")
    parser.add_argument("--config", help="Recipe: a YAML file, or one of: " + ", ".join(packaged_recipes()))
    argv = sys.argv[1:] if argv is None else argv
    config = parser.parse_known_args(argv)[0].config
    if config is not None:
        parser.set_defaults(**load_recipe(config))
    model, data, training, _ = parser.parse_args_into_dataclasses(argv)
    data.train_files = [expand(path) for path in data.train_files]
    data.eval_files = [expand(path) for path in data.eval_files]
    if isinstance(model.model_overrides, str):
        model.model_overrides = yaml.safe_load(model.model_overrides)
    return model, data, training
