"""Fine-tuning: a run that begins with the weights, the vocabulary and the search of a trained model."""

import dataclasses
import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.configuration_vaswani import TABLE_3

from ..data.tokenizer import parts_of_new_tokens
from ..inference.checkpoint_files import check_folder
from ..inference.loading import load_model as load_checked
from ..inference.loading import load_tokenizer
from .arguments import ModelArguments, VaswaniTrainingArguments
from .checkpoints import PARTIAL, clear_partial, naming_what_failed, put_in_place


logger = logging.getLogger(__name__)


# What may differ from the checkpoint: no weight depends on it.
FREE_FIELDS = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]  # all linear layers of attention and feed-forward
ADAPTER_NAME = "adapter"  # folder in the run's


def starting_checkpoint(init_from: str) -> Path:
    """The folder of the checkpoint to begin with; one that the Hub has is downloaded first.

    Raises:
        FileNotFoundError: There is no such folder, and it cannot be had from the Hub.
        ValueError: It holds another kind of model, or an adapter only.
    """
    folder = Path(init_from)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(init_from, ignore_patterns=["*/*"]))  # not the run's own checkpoints
        except (OSError, HFValidationError) as error:
            raise FileNotFoundError(f"init_from {init_from}: no such folder, and not on the Hub: {error}") from error
    check_folder(folder, ours=True)
    return folder


def starting_config(folder: Path, model_args: ModelArguments) -> VaswaniConfig:
    """The checkpoint's configuration, with the dropout and the label smoothing of the run.

    Raises:
        ValueError: The run asks for something that the checkpoint's weights do not have, or for an unknown field.
    """
    config = VaswaniConfig.from_pretrained(folder)
    known = {field.name for field in dataclasses.fields(VaswaniConfig)} | set(VaswaniConfig.attribute_map)
    VaswaniConfig.from_table3(model_args.model)  # raises if there is no such row
    for name, value in {**TABLE_3[model_args.model], **(model_args.model_overrides or {})}.items():
        if name not in known:
            raise ValueError(f"model_overrides: VaswaniConfig has no field {name!r}.")
        if name not in FREE_FIELDS and getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)!r} in {folder}, and the run asks for {value!r}: with init_from, "
                f"model and model_overrides may change {', '.join(FREE_FIELDS)} only."
            )
        try:
            setattr(config, name, value)
            config.validate()
        except StrictDataclassError as error:
            raise ValueError(f"model_overrides, {name}: {' '.join(str(error).split())}") from error
    return config


def load_model(
    model_args: ModelArguments, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> VaswaniForConditionalGeneration:
    """The checkpoint's model and generation settings, for a vocabulary that is the checkpoint's or extends it.

    Args:
        model_args (`ModelArguments`): Of the run.
        folder (`Path`): From `starting_checkpoint`.
        tokenizer (`PreTrainedTokenizerBase`): Of the run.

    Raises:
        OSError: The weights are damaged.
        ValueError: The run asks for what the checkpoint does not have, or its vocabulary does not fit its weights.
    """
    config = starting_config(folder, model_args)
    if model_args.vocab_size not in (ModelArguments.vocab_size, config.vocab_size):
        raise ValueError(
            f"vocab_size={model_args.vocab_size}: with init_from the vocabulary is that of {folder}, "
            f"{config.vocab_size} tokens, to which extend_vocabulary adds."
        )
    model = load_checked(
        folder,
        VaswaniForConditionalGeneration,
        config=config,
        dtype=torch.float32,
        attn_implementation=model_args.attn_implementation,
    )
    own = load_tokenizer(folder, model_args.trust_remote_code)
    if (largest := max(own.get_vocab().values())) >= config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has an id {largest}, the model {config.vocab_size} embeddings.")
    if model_args.extend_vocabulary:
        extend_embeddings(model, own, tokenizer)
    return model


@torch.no_grad()
def extend_embeddings(model: PreTrainedModel, old: PreTrainedTokenizerBase, extended: PreTrainedTokenizerBase) -> None:
    """Rows for the new tokens, in the embedding and in the output projection: each the mean of the rows of the old
    tokens that it replaces."""
    size = max(model.config.vocab_size, max(extended.get_vocab().values()) + 1)
    model.resize_token_embeddings(size, mean_resizing=False)
    weights = [model.get_input_embeddings().weight]
    if not model.config.tie_word_embeddings:
        weights.append(model.get_output_embeddings().weight)
    for token, parts in parts_of_new_tokens(old, extended).items():
        for weight in weights:
            weight[token] = weight[parts].mean(0)


def add_adapters(model: VaswaniForConditionalGeneration, rank: int, args: VaswaniTrainingArguments):
    """The model with low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) on all linear layers of attention and
    feed-forward, which alone are trained; their product is scaled by 2, and has the model's dropout, no other.

    Args:
        model (`VaswaniForConditionalGeneration`): Gets the adapters.
        rank (`int`): Of the adapters.
        args (`VaswaniTrainingArguments`): Of the run that is to train them.

    Returns:
        The `peft.PeftModel`.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: The run asks for what cannot be done with adapters.
    """
    if args.average is not None:
        raise ValueError(
            f"average={args.average} with lora_rank: the mean of adapters is not that of what they make of the model."
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("lora_rank: not with weights that FSDP or DeepSpeed divide among devices.")
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise ImportError(f"lora_rank needs PEFT: pip install 'hf-vaswani[lora]' ({error}).") from error
    config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=rank, lora_alpha=2 * rank, target_modules=ADAPTED)
    return get_peft_model(model, config)


def merge_adapters(trainer, init_from: str) -> None:
    """Keeps the trained adapters in `adapter/` in the run's folder, and makes them part of the model's weights.

    Args:
        trainer (`VaswaniTrainer`): After its training; its model is an ordinary one afterwards.
        init_from (`str`): Whose adapters they are; a name on the Hub, not where it lies in the cache.
    """
    model, run = trainer.model, Path(trainer.args.output_dir)
    if trainer.args.should_save:
        model.active_peft_config.base_model_name_or_path = init_from
        # Embeddings have not changed; PEFT would ask the Hub whether they have.
        with naming_what_failed(run, "the adapter could not be written", lambda: clear_partial(run)):
            model.save_pretrained(run / PARTIAL / ADAPTER_NAME, save_embedding_layers=False)
            put_in_place(run / PARTIAL / ADAPTER_NAME, run / ADAPTER_NAME)
    trainer.model = trainer.model_wrapped = model.merge_and_unload()


class EarlyStopping(EarlyStoppingCallback):
    """Stops the training when `metric_for_best_model` has not become better in `early_stopping_patience` evaluations
    in a row, those of the warm-up not counted. It goes on counting where a resumed run had got to; the patience may
    be another then."""

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.global_step <= args.get_warmup_steps(state.max_steps):
            return
        super().on_evaluate(args, state, control, metrics, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            logger.info(
                "Stopped after update %d: %s has not become better in %d evaluations.",
                state.global_step,
                args.best_metric,
                self.early_stopping_patience_counter,
            )
