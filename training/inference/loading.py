"""Load checkpoints: model and tokenizer, alone or as an ensemble. Wherever one is read here, foreign code is refused
unless asked for, and weights must fit."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from hf_vaswani import VaswaniTranslationPipeline

from .checkpoint_files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    check_finite,
    check_fit,
    check_folder,
    check_tokenizer_files,
    naming,
    other_settings,
)


DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
MAX_SOURCE_TOKENS = 1024  # of a model that has no limit itself


def find_checkpoint(name: str | Path) -> Path:
    """The folder of a checkpoint; of a Hub repository, the cache's, with its configuration.

    Raises:
        NotADirectoryError: A file.
        OSError: No such folder or repository.
    """
    if Path(name).is_file():
        raise NotADirectoryError(f"{name}: expected a checkpoint folder, found a file.")
    if Path(name).is_dir():
        return Path(name)
    try:
        for file in (GENERATION, TOKENIZER, TOKENIZER_CONFIG):
            cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
        return Path(cached_file(str(name), CONFIG)).parent
    except OSError as error:
        text = " ".join(str(error).split())
        raise OSError(f"{name}: no such folder, and loading it from the Hub failed: {text}") from error


def load_model(
    name: str | Path,
    model_class: type[Any] = AutoModelForSeq2SeqLM,
    trust_remote_code: bool = False,
    **kwargs,
) -> PreTrainedModel:
    """The model of a folder or a Hub repository, whose weights are all there, fit, and are finite.

    Args:
        name (`str` or `Path`): Folder or repository.
        model_class (`type`): Whose `from_pretrained` loads it.
        trust_remote_code (`bool`): Whether Python code that comes with a foreign model is run. The code in this
            project's own checkpoints is never run: it is that of `hf_vaswani`, which is here.
        **kwargs: For `from_pretrained`.

    Raises:
        OSError: No such checkpoint, or its weights are damaged.
        ValueError: A file is broken, foreign code is refused, the model is larger than the memory, or weights are
            missing, unexpected, of another shape or not finite. The message names the file, field or weight.
    """
    check_folder(find_checkpoint(name), trust_remote_code, ours=model_class is not AutoModelForSeq2SeqLM)
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported, and refused below
    with naming(name), no_report():
        model, report = model_class.from_pretrained(str(name), trust_remote_code=trust_remote_code, **kwargs)
    check_fit(name, report)
    check_finite(name, model)
    return model


@contextlib.contextmanager
def no_report() -> Iterator[None]:
    """Keep the library from logging a table of the weights that do not fit, of which `check_fit` says a line."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # a level of its own would make the library verify its tensor-parallel plan
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hub repository.

    Args:
        name (`str` or `Path`): Folder or repository.
        trust_remote_code (`bool`): Whether Python code that comes with it is run.

    Raises:
        OSError: No such checkpoint.
        ValueError: A file is broken, or foreign code is refused.
    """
    if Path(name).is_file():
        raise NotADirectoryError(f"{name}: expected a folder with a tokenizer, found a file.")
    check_tokenizer_files(Path(name))
    with naming(Path(name) / TOKENIZER_CONFIG if Path(name).is_dir() else name):
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=trust_remote_code)
        tokenizer.pad(tokenizer(["a", "a b c"]), return_tensors="pt")  # some fields come out only in use
    return tokenizer


def load_checkpoint(
    name: str, dtype: str = "auto", device: torch.device | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer of a folder or a Hub repository.

    Args:
        name (`str`): Folder or repository.
        dtype (`str`): Type to compute with: one of `DTYPES`; "auto" is the one the weights have, "int8" is for a CPU.
        device (`torch.device`, *optional*): Where to; the accelerator, if there is one.
        trust_remote_code (`bool`): See `load_model`.

    Raises:
        OSError: No such checkpoint.
        ValueError: As of `load_model` and `load_tokenizer`; or the tokenizer does not have as many tokens as the
            model, give or take some padding of the latter.
    """
    wanted = "float32" if dtype == "int8" else dtype
    model = load_model(name, trust_remote_code=trust_remote_code, dtype=wanted)
    tokenizer = load_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    try_search(name, model)
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if dtype == "int8":
        model, device = model.to_int8(), "cpu"
    return model.eval().to(device), tokenizer


def check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError where model and tokenizer do not belong together."""
    size = model.config.vocab_size
    if not 0 <= size - len(tokenizer) < VaswaniTranslationPipeline.MOST_PADDING:
        raise ValueError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {size}.")
    if (largest := max(tokenizer.get_vocab().values())) >= size:
        raise ValueError(f"{name}: {TOKENIZER}: expected ids of the model's {size} tokens, found {largest}.")


@torch.no_grad()
def try_search(name: str, model: PreTrainedModel) -> None:
    """Search for two tokens with the checkpoint's own settings, where it has some that `check_generation` has no rule
    for: what is wrong with them comes out before the work.

    Raises:
        ValueError: The settings do not work.
    """
    settings = model.generation_config.to_diff_dict()
    if not (others := other_settings(settings)):
        return
    place = Path(name) / GENERATION if Path(name).is_dir() else f"{name}: {GENERATION}"
    with naming(f"{place}: {', '.join(others)}", foreign_code=False):
        model.eval().generate(torch.tensor([[model.config.eos_token_id or 0]]), max_new_tokens=2)


def load_ensemble(
    names: list[str], dtype: str = "auto", device: torch.device | None = None, trust_remote_code: bool = False
) -> tuple[list[PreTrainedModel], PreTrainedTokenizerBase]:
    """Models that decode together, and their one tokenizer.

    Args:
        names, dtype, device, trust_remote_code: As of `load_checkpoint`, one name or more.

    Raises:
        ValueError: Two checkpoints have different tokenizers.
    """
    models, tokenizers = zip(*(load_checkpoint(name, dtype, device, trust_remote_code) for name in names))
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
