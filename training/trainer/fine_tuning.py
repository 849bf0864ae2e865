"""Fine-tuning: start a run from the weights, vocabulary and search settings of a trained model."""

import dataclasses
import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from torch import nn
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.configuration_vaswani import TABLE_3

from ..data.tokenizer import parts_of_new_tokens
from ..data.two_sided_tokenizer import TARGET_TOKENIZER, TARGET_VOCAB_SIZE, TwoSidedTokenizer
from ..inference.checkpoint_files import check_folder
from ..inference.loading import available_copy, load_tokenizer, missing_checkpoint
from ..inference.loading import load_model as load_checked
from .arguments import ModelArguments, VaswaniTrainingArguments
from .checkpoints import PARTIAL, clear_partial, naming_what_failed, put_in_place


logger = logging.getLogger(__name__)


# Fields that may differ from the checkpoint's: no weight depends on them.
FREE_FIELDS = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]  # all linear layers of attention and feed-forward
ADAPTER_NAME = "adapter"  # subfolder of the run's folder


def starting_checkpoint(init_from: str) -> Path:
    """Folder of the checkpoint to fine-tune, downloaded from the Hub if it is not a local folder.

    Raises:
        FileNotFoundError: No such folder, and the download failed.
        ValueError: The checkpoint holds another kind of model, or an adapter only.
    """
    folder = Path(available_copy(init_from))
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(init_from, ignore_patterns=["*/*"]))  # without its training checkpoints
        except (OSError, HFValidationError) as error:
            raise FileNotFoundError(f"init_from: {missing_checkpoint(init_from, error)}") from error
    check_folder(folder, ours=True)
    return folder


def starting_config(folder: Path, model_args: ModelArguments) -> VaswaniConfig:
    """The checkpoint's configuration, with the dropout and label smoothing of the run.

    Raises:
        ValueError: The run sets an unknown field, or one that conflicts with the checkpoint's weights; or the
            checkpoint has two vocabularies and one tokenizer.
    """
    config = VaswaniConfig.from_pretrained(folder)
    if config.source_vocab_size is not None and not (folder / TARGET_TOKENIZER).is_file():
        raise ValueError(
            f"init_from {folder}: source_vocab_size is {config.source_vocab_size}, but one tokenizer reads both "
            f"languages: expected a model with one vocabulary, or {TARGET_TOKENIZER}."
        )
    known = {field.name for field in dataclasses.fields(VaswaniConfig)} | set(VaswaniConfig.attribute_map)
    VaswaniConfig.from_table3(model_args.model)  # raises for an unknown row
    for name, value in {**TABLE_3[model_args.model], **(model_args.model_overrides or {})}.items():
        if name not in known:
            raise ValueError(f"model_overrides: VaswaniConfig has no field {name!r}.")
        if name not in FREE_FIELDS and getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)!r} in {folder}, but the run sets {value!r}: with init_from, model "
                f"and model_overrides may change {', '.join(FREE_FIELDS)} only."
            )
        try:
            setattr(config, name, value)
            config.validate()
        except StrictDataclassError as error:
            raise ValueError(f"model_overrides, {name}: {' '.join(str(error).split())}") from error
    return config


def load_model(model_args: ModelArguments, folder: Path) -> VaswaniForConditionalGeneration:
    """Load the checkpoint's model and generation settings. `extend_embeddings` adds embeddings of new tokens.

    Args:
        model_args (`ModelArguments`): Arguments of the run.
        folder (`Path`): From `starting_checkpoint`.

    Raises:
        OSError: The weights are damaged.
        ValueError: The run's settings conflict with the checkpoint, or its tokenizer does not match its weights.
    """
    config = starting_config(folder, model_args)
    if model_args.vocab_size not in (ModelArguments.vocab_size, config.vocab_size):
        raise ValueError(
            f"vocab_size={model_args.vocab_size}: with init_from, the vocabulary is that of {folder}, "
            f"{config.vocab_size} tokens; extend_vocabulary adds to it."
        )
    own, size = load_tokenizer(folder, model_args.trust_remote_code), config.source_vocab_size or config.vocab_size
    if (largest := max(own.get_vocab().values())) >= size:
        raise ValueError(f"{folder}: the tokenizer has an id {largest}, but the model {size} embeddings.")
    if isinstance(own, TwoSidedTokenizer) and own.target_vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder}: {TARGET_VOCAB_SIZE} of the tokenizer is {own.target_vocab_size}, but the model has "
            f"{config.vocab_size} tokens."
        )
    return load_checked(
        folder,
        VaswaniForConditionalGeneration,
        config=config,
        dtype=torch.float32,
        attn_implementation=model_args.attn_implementation,
    )


@torch.no_grad()
def extend_embeddings(model: PreTrainedModel, old: PreTrainedTokenizerBase, extended: PreTrainedTokenizerBase) -> None:
    """Add rows for new tokens to the embeddings and the output projection.

    Each new row, and its output bias, is the mean of those of the old tokens that the new token replaces. The row of a
    new character is that of the unknown token, which the model has read in its place. Where both languages share an
    embedding, the segmentation into fewer tokens counts.
    """
    of_sources, of_targets = parts_of_new_tokens(old, extended)
    if model.config.source_vocab_size is None:
        of_targets = {**of_sources, **{i: min(parts, of_sources[i], key=len) for i, parts in of_targets.items()}}
    else:
        size = model.config.source_vocab_size + len(extended) - len(old)
        weight = _extended_rows(model.model.encoder.embed_tokens.weight, of_sources, size)
        model.model.encoder.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=False)
        model.config.source_vocab_size = size
    size = max(model.config.vocab_size, max(of_targets, default=-1) + 1)
    rows = [_extended_rows(weight, of_targets, size) for weight in _written_rows(model)]
    model.resize_token_embeddings(size, mean_resizing=False)
    for weight, extended_rows in zip(_written_rows(model), rows):
        weight.copy_(extended_rows)


def _written_rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Weights of the model with a row for each token that it writes."""
    weights = [model.get_input_embeddings().weight]
    if not model.config.tie_word_embeddings:
        weights.append(model.get_output_embeddings().weight)
    if model.config.output_bias:
        weights.append(model.get_output_embeddings().bias)
    return weights


def _extended_rows(weight: torch.Tensor, parts: dict[int, list[int]], size: int) -> torch.Tensor:
    """`size` rows: those of `weight`, and for each id in `parts` the mean of the rows of its parts."""
    rows = weight.new_zeros(size, *weight.shape[1:])
    rows[: len(weight)] = weight
    for token, of_token in parts.items():
        rows[token] = weight[of_token].mean(0)
    return rows


def add_adapters(model: VaswaniForConditionalGeneration, rank: int, args: VaswaniTrainingArguments):
    """Add low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) to the model.

    All linear layers of attention and feed-forward get adapters; only the adapters are trained. Their product is
    scaled by 2, without dropout beyond the model's own.

    Args:
        model (`VaswaniForConditionalGeneration`): Model to adapt, in place.
        rank (`int`): Rank of the adapters.
        args (`VaswaniTrainingArguments`): Arguments of the run.

    Returns:
        The `peft.PeftModel`.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: The run averages weights, or shards them by FSDP or DeepSpeed.
    """
    if args.average is not None:
        raise ValueError(
            f"average={args.average} with lora_rank: averaging adapters does not average the adapted weights."
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("lora_rank: adapters cannot be combined with weights sharded by FSDP or DeepSpeed.")
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise ImportError(f"lora_rank needs PEFT: pip install 'hf-vaswani[lora]' ({error}).") from error
    config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=rank, lora_alpha=2 * rank, target_modules=ADAPTED)
    return get_peft_model(model, config)


def merge_adapters(trainer, init_from: str) -> None:
    """Save the trained adapters to `adapter/` in the run's folder, and merge them into the model's weights.

    Args:
        trainer (`VaswaniTrainer`): Trainer after training; its model becomes an ordinary one.
        init_from (`str`): Base model to record in the adapter: a folder or a repository on the Hub, not a cache path.
    """
    model, run = trainer.model, Path(trainer.args.output_dir)
    if trainer.args.should_save:
        model.active_peft_config.base_model_name_or_path = init_from
        # The embeddings are unchanged; by default, PEFT would ask the Hub to find out.
        with naming_what_failed(run, "the adapter could not be written", lambda: clear_partial(run)):
            model.save_pretrained(run / PARTIAL / ADAPTER_NAME, save_embedding_layers=False)
            put_in_place(run / PARTIAL / ADAPTER_NAME, run / ADAPTER_NAME)
    trainer.model = trainer.model_wrapped = model.merge_and_unload()


class EarlyStopping(EarlyStoppingCallback):
    """Stop after `early_stopping_patience` consecutive evaluations without improvement of `metric_for_best_model`.

    Evaluations during the warm-up do not count. A resumed run restores the count, but may change the patience.
    """

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
                "Stopped after update %d: no improvement of %s in %d evaluations.",
                state.global_step,
                args.best_metric,
                self.early_stopping_patience_counter,
            )
