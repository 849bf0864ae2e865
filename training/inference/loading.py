"""Load checkpoints for inference: model and tokenizer, alone or as an ensemble."""

from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniTranslationPipeline


DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
MAX_SOURCE_TOKENS = 1024  # of a model that has no limit itself


def load_checkpoint(
    name: str, dtype: str = "auto", device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer of a folder or a Hub repository.

    Args:
        name (`str`): Folder or repository.
        dtype (`str`): Type to compute with: one of `DTYPES`; "auto" is the one the weights have, "int8" is for a CPU.
        device (`torch.device`, *optional*): Where to; the accelerator, if there is one.

    Raises:
        OSError: No such checkpoint.
        ValueError: The tokenizer does not have as many tokens as the model, give or take some padding of the latter.
    """
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="float32" if dtype == "int8" else dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(f"{name}: no such folder, and loading it from the Hub failed: {error}") from error
    if not 0 <= model.config.vocab_size - len(tokenizer) < VaswaniTranslationPipeline.MOST_PADDING:
        raise ValueError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}.")
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if dtype == "int8":
        model, device = model.to_int8(), "cpu"
    return model.eval().to(device), tokenizer


def load_ensemble(
    names: list[str], dtype: str = "auto", device: torch.device | None = None
) -> tuple[list[PreTrainedModel], PreTrainedTokenizerBase]:
    """Models that decode together, and their one tokenizer.

    Args:
        names, dtype, device: As of `load_checkpoint`, one name or more.

    Raises:
        ValueError: Two checkpoints have different tokenizers.
    """
    models, tokenizers = zip(*(load_checkpoint(name, dtype, device) for name in names))
    for name, tokenizer in zip(names, tokenizers):
        if tokenizer.backend_tokenizer.to_str() != tokenizers[0].backend_tokenizer.to_str():
            raise ValueError(f"{names[0]} and {name} have different tokenizers; an ensemble needs the same.")
    return list(models), tokenizers[0]


def source_limit(models: list[PreTrainedModel], wanted: int | None = None) -> int:
    """Most source tokens of a line, with the end token: what is wanted, or else what the models allow.

    Raises:
        ValueError: More is wanted than the models have learned positions for.
    """
    places = min((limit for limit in map(position_limit, models) if limit is not None), default=None)
    if places is not None and (wanted or 0) > places:
        raise ValueError(f"--max-source-tokens {wanted}: the model's learned positions end at {places}.")
    return wanted or places or MAX_SOURCE_TOKENS


def position_limit(model: PreTrainedModel) -> int | None:
    """Tokens for which a model has learned positions; sinusoids have no limit."""
    if getattr(model.config, "position_embedding", None) != "learned":
        return None
    return model.config.max_position_embeddings
