"""Training arguments, from a recipe and the command line; see `command_line`."""

from dataclasses import MISSING, dataclass, fields

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Seq2SeqTrainingArguments

from hf_vaswani import VaswaniConfig

from ..options import suggestion
from .command_line import Values, naming_recipe, parse_values
from .fields import METRICS, DataArguments, ModelArguments, TrainingFields, check_positive, check_values
from .inherited import WITHOUT_EFFECT


@dataclass
class VaswaniTrainingArguments(TrainingFields, Seq2SeqTrainingArguments):
    """transformers' arguments with the paper's defaults (sections 5.1 to 5.4), token budgets and averaging."""

    def __post_init__(self):
        check_values(self)
        # bf16 without an accelerator requires use_cpu.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.max_steps is None:
            self.max_steps = 100_000 if self.num_train_epochs is None else -1
        if self.num_train_epochs is None:
            self.num_train_epochs = 1.0  # max_steps takes precedence
        if not self.eval_bleu and self.best_metric == "eval_bleu":
            self.metric_for_best_model = "eval_f1" if self.eval_f1 else "eval_loss"
        if not self.eval_f1 and self.best_metric == "eval_f1":
            raise ValueError("metric_for_best_model=eval_f1 needs eval_f1, which parses the evaluation set.")
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
        check_positive(self, "num_beams")
        for name in ("length_penalty", "max_extra_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
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
        for name, default in WITHOUT_EFFECT.items():
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


def parse_arguments(argv: list[str] | None = None) -> tuple[ModelArguments, DataArguments, VaswaniTrainingArguments]:
    """Parse a recipe and the command line into the three groups of arguments.

    Args:
        argv (`list[str]`, *optional*): Command-line arguments; `sys.argv[1:]` when not given.

    Raises:
        ValueError: Unknown field, or invalid value.
        FileNotFoundError: No such recipe.
    """
    return make_arguments(parse_values(argv))


def make_arguments(values: Values) -> tuple[ModelArguments, DataArguments, VaswaniTrainingArguments]:
    """Make the three groups of arguments of parsed values.

    Raises:
        ValueError: Invalid or conflicting values.
    """
    with naming_recipe(values.config):
        check_overrides(values.model)
        return values.model, values.data, VaswaniTrainingArguments(**values.training)


def check_overrides(model: ModelArguments) -> None:
    """Raise ValueError for fields that `VaswaniConfig` lacks, and for values that a new model cannot have."""
    overrides = model.model_overrides or {}
    known = {field.name for field in fields(VaswaniConfig)} | set(VaswaniConfig.attribute_map)
    for name in overrides:
        if name not in known:
            raise ValueError(f"model_overrides: VaswaniConfig has no field {name!r:.60}.{suggestion(name, known)}")
    if model.init_from is None:
        try:
            VaswaniConfig.from_table3(model.model, **overrides)
        except StrictDataclassError as error:
            raise ValueError(f"model_overrides {overrides}: {error}") from error


def defaults() -> dict:
    """Default value of each field of a recipe."""
    all_fields = [field for group in GROUPS for field in fields(group)]
    return {f.name: f.default if f.default is not MISSING else f.default_factory() for f in all_fields if f.init}
