"""Fields of a recipe that this project defines, in three groups. transformers adds others; see `inherited`."""

import json
import math
from dataclasses import dataclass, field, fields
from typing import Literal, get_type_hints

from ..options import suggestion
from ..paper import PAPER


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
        default=None,
        metadata={
            "help": 'Fields of VaswaniConfig that replace those of the row, as {"d_model": 128}. label_smoothing, 0.1 '
            "in the paper, is one of them."
        },
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
        metadata={
            "help": "With init_from: maximum number of tokens to add to a vocabulary of byte-level BPE or Unigram "
            "(SentencePiece), learned from both sides of the training pairs. Unigram gets unknown characters first."
        },
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
        if self.model not in PAPER:
            raise ValueError(
                f"model: Table 3 has no row {self.model!r}.{suggestion(self.model, PAPER)} Rows: {', '.join(PAPER)}."
            )
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
            "help": "Training pairs: two parallel text files, or one .tsv, .jsonl or .parquet file; or trees: one or "
            "more .trees files. All but .parquet may be compressed (.gz).",
            "aliases": ["--train_file"],
        },
    )
    eval_files: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Evaluation pairs, in the formats of train_files.",
            "aliases": ["--eval_file"],
        },
    )
    tree_tags: Literal["keep", "XX"] = field(
        default="keep",
        metadata={"help": "Symbols for the words of .trees files: their tags, or XX for all of them."},
    )
    strip_trees: bool = field(
        default=False, metadata={"help": "Remove and count traces and function tags in .trees files."}
    )
    tree_weights: list[str] = field(
        default_factory=list,
        metadata={"help": "For each .trees file of train_files, how many times it is read in an epoch."},
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
        if not all(weight.isascii() and weight.isdigit() and int(weight) > 0 for weight in self.tree_weights):
            raise ValueError(f"tree_weights: expected whole numbers above 0, found {', '.join(self.tree_weights)}.")


METRICS = {"eval_loss": False, "eval_perplexity": False, "eval_bleu": True, "eval_f1": True}  # True: higher is better


@dataclass
class TrainingFields:
    """Training, evaluation and checkpoints, with the paper's defaults (sections 5.1 to 5.4)."""

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
    eval_f1: bool = field(
        default=False,
        metadata={"help": "Parse the evaluation set, which must be trees, and report bracketing F1 instead of BLEU."},
    )
    bleu_tokenize: str = field(
        default="13a",
        metadata={"help": "sacreBLEU tokenisation for eval_bleu: 13a for raw text, none for tokenised text."},
    )
    num_beams: int | None = field(
        default=None,
        metadata={
            "help": "Beams of the search that the checkpoint records; by default the paper's 4, or those of init_from."
        },
    )
    length_penalty: float | None = field(
        default=None,
        metadata={
            "help": "Length penalty of the checkpoint's search; by default the paper's 0.6, or that of init_from."
        },
    )
    max_extra_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens by which an output may exceed its source; by default the paper's 50 for "
            "translation, or that of init_from. The paper's parser has 300."
        },
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
    adam_beta1: float = field(default=0.9, metadata={"help": "β1 of Adam."})
    adam_beta2: float = field(default=0.98, metadata={"help": "β2 of Adam."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "ε of Adam."})
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Maximum norm of the gradient; 0 for no clipping, as in the paper."}
    )
    lr_scheduler_type: str = field(
        default="inverse_sqrt",
        metadata={"help": "Schedule of the learning rate: the paper's inverse_sqrt, or one of transformers."},
    )
    warmup_steps: float = field(
        default=4000, metadata={"help": "Updates until the peak learning rate; below 1, as a share of all updates."}
    )
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate; by default, the paper's (section 5.3)."}
    )
    max_steps: int | None = field(
        default=None, metadata={"help": "Number of updates; 100,000 unless num_train_epochs is given."}
    )
    num_train_epochs: float | None = field(default=None, metadata={"help": "Number of epochs, instead of max_steps."})

    logging_steps: float = field(default=100, metadata={"help": "Updates between two lines of the log."})
    eval_strategy: Literal["no", "steps", "epoch"] = field(default="steps", metadata={"help": "When to evaluate."})
    eval_steps: float | None = field(
        default=1000, metadata={"help": "Updates between two evaluations, a multiple of save_steps."}
    )
    save_strategy: Literal["no", "steps", "epoch", "best"] = field(
        default="steps", metadata={"help": "When to write checkpoints."}
    )
    save_steps: float = field(default=1000, metadata={"help": "Updates between two checkpoints."})
    save_total_limit: int | None = field(
        default=20, metadata={"help": "Maximum number of checkpoints to keep: the last ones and the best."}
    )
    metric_for_best_model: str | None = field(
        default="eval_bleu",
        metadata={"help": "Metric of the best checkpoint: eval_loss, eval_perplexity, eval_bleu or eval_f1."},
    )
    report_to: str | list[str] | None = field(
        default="tensorboard", metadata={"help": "Where to log, such as tensorboard, wandb or none."}
    )
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


OWN_GROUPS = (ModelArguments, DataArguments, TrainingFields)
