"""Loading of checkpoints: model and tokenizer, single or as an ensemble.

Foreign code is refused unless `trust_remote_code` is set, and weights must match the configuration.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from hf_vaswani import VaswaniTranslationPipeline

from ..data.two_sided_tokenizer import TARGET_TOKENIZER, TARGET_VOCAB_SIZE, TwoSidedTokenizer, definition
from ..hub_connection import hub_failure
from ..notices import are_held_back
from .checkpoint_files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TRUST,
    check_finite,
    check_fit,
    check_folder,
    check_tokenizer_files,
    one_line_errors,
    unchecked_settings,
)
from .choices import MAX_SOURCE_TOKENS


if are_held_back():
    disable_progress_bar()  # of loading and saving weights


def find_checkpoint(name: str | Path) -> Path:
    """Return the folder of a checkpoint. Download the configuration files of a Hub repository into the cache.

    Raises:
        NotADirectoryError: The name is that of a file.
        OSError: There is no such folder or repository, or the Hub does not answer and the cache has no copy.
    """
    path = Path(name)
    if path.is_file():
        hint = f": its folder is {path.parent}" if (path.parent / CONFIG).is_file() else ""
        raise NotADirectoryError(f"{name}: expected a checkpoint folder, found a file{hint}.")
    if Path(source := available_copy(name)).is_dir():
        return Path(source)
    try:
        folder = Path(cached_file(source, CONFIG)).parent
    except OSError as error:
        raise OSError(missing_checkpoint(name, error)) from error
    for file in (GENERATION, TOKENIZER, TOKENIZER_CONFIG):
        with contextlib.suppress(OSError):  # the repository may lack it
            cached_file(source, file)
    return folder


def available_copy(name: str | Path) -> str:
    """Folder or repository to load a checkpoint from: the repository's folder in the cache where the Hub does not
    answer. With the repository's name, the libraries would ask again and wait, `local_files_only` or not.

    Raises:
        OSError: The Hub does not answer, and the cache has no copy.
    """
    if Path(name).is_dir() or hub_failure() is None:
        return str(name)
    try:
        return snapshot_download(str(name), local_files_only=True)
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(missing_checkpoint(name, error)) from error


def missing_checkpoint(name: str | Path, error: Exception) -> str:
    """Message about a checkpoint that is neither a folder nor loads from the Hub."""
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return f"{name}: no such folder, and not the name of a Hub repository, user/name."
    if (failure := hub_failure()) is not None:
        return (
            f"{name}: no such folder, and no copy of that Hub repository in the cache ({failure}). Check the path or "
            "the name, and the network."
        )
    return f"{name}: no such folder, and loading it from the Hub failed: {' '.join(str(error).split())}"


def load_model(
    name: str | Path,
    model_class: type[Any] = AutoModelForSeq2SeqLM,
    trust_remote_code: bool = False,
    **kwargs,
) -> PreTrainedModel:
    """Load a model, and check that its weights are complete, have the expected shapes, and are finite.

    Args:
        name (`str` or `Path`): Checkpoint folder or Hub repository.
        model_class (`type`): Class whose `from_pretrained` loads the model.
        trust_remote_code (`bool`): Run the Python code that a foreign model brings along. The code in this project's
            own checkpoints is never run, because it duplicates the installed `hf_vaswani`.
        **kwargs: Arguments of `from_pretrained`.

    Raises:
        OSError: There is no such checkpoint, or its weights are damaged.
        ValueError: A file is malformed, foreign code is refused, the model exceeds the available memory, or weights
            are missing, unexpected, of the wrong shape or not finite. The message names the file, field or weight.
    """
    check_folder(find_checkpoint(name), trust_remote_code, ours=model_class is not AutoModelForSeq2SeqLM)
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # check_fit refuses mismatches
    with one_line_errors(name), no_loading_report():
        model, report = model_class.from_pretrained(
            available_copy(name), trust_remote_code=trust_remote_code, **kwargs
        )
    check_fit(name, report)
    check_finite(name, model)
    return model


@contextlib.contextmanager
def no_loading_report() -> Iterator[None]:
    """Suppress the table of mismatched weights that transformers logs. `check_fit` reports them in one line."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # a level of its own would make the library verify its tensor-parallel plan
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer: a `TwoSidedTokenizer` if the checkpoint has a target side of its own.

    Args:
        name (`str` or `Path`): Checkpoint folder or Hub repository.
        trust_remote_code (`bool`): Run the Python code that the tokenizer brings along.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: A file is malformed, or foreign code is refused.
    """
    if Path(name).is_file():
        raise NotADirectoryError(f"{name}: expected a folder with a tokenizer, found a file.")
    folder = Path(available_copy(name))
    check_tokenizer_files(folder)
    try:
        with one_line_errors(folder / TOKENIZER_CONFIG if folder.is_dir() else name):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            if (size := tokenizer.init_kwargs.get(TARGET_VOCAB_SIZE)) is not None:
                tokenizer = TwoSidedTokenizer(tokenizer, _target_side(folder), size)
            tokenizer.pad(tokenizer(["a", "a b c"]), return_tensors="pt")  # some invalid fields fail only in use
    except (OSError, ValueError) as error:
        if folder.is_dir() and not (folder / TOKENIZER).is_file() and TRUST not in str(error):
            raise FileNotFoundError(missing_tokenizer(folder)) from error
        if isinstance(error, OSError) and not folder.is_dir():
            raise OSError(missing_checkpoint(name, error)) from error
        raise
    return tokenizer


def _target_side(folder: Path) -> Tokenizer:
    """Read the `target_tokenizer.json` of a folder or Hub repository.

    Raises:
        OSError: There is none.
    """
    path = folder / TARGET_TOKENIZER
    if folder.is_dir() and not path.is_file():
        raise FileNotFoundError(
            f"{folder / TOKENIZER_CONFIG}: {TARGET_VOCAB_SIZE}: expected {TARGET_TOKENIZER} beside it, which segments "
            "given translations, found none. Copy it from the original checkpoint."
        )
    return Tokenizer.from_file(str(path if folder.is_dir() else cached_file(str(folder), TARGET_TOKENIZER)))


def missing_tokenizer(folder: Path) -> str:
    """Message about a folder without a tokenizer. Suggests that of the run."""
    source = folder.resolve().parent
    hint = f" {source} has one: copy its *tokenizer*.json." if (source / TOKENIZER).is_file() else ""
    return f"{folder}: no tokenizer: expected {TOKENIZER} and {TOKENIZER_CONFIG}.{hint}"


def load_checkpoint(
    name: str, dtype: str = "auto", device: torch.device | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in evaluation mode and its tokenizer.

    Args:
        name (`str`): Checkpoint folder or Hub repository.
        dtype (`str`): One of `options.DTYPES`, for the computation. "auto" is the type of the weights; "int8" needs
            the CPU.
        device (`torch.device`, *optional*): Device of the model; defaults to the accelerator if there is one.
        trust_remote_code (`bool`): See `load_model`.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: See `load_model` and `load_tokenizer`. Also: model and tokenizer have different vocabulary sizes,
            apart from some padding of the model's.
    """
    load_dtype = "float32" if dtype == "int8" else dtype
    model = load_model(name, trust_remote_code=trust_remote_code, dtype=load_dtype)
    tokenizer = load_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    try_search(name, model)
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if dtype == "int8":
        model, device = model.to_int8(), "cpu"
    return model.eval().to(device), tokenizer


def check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the vocabularies of model and tokenizer do not match."""
    size = getattr(model.config, "source_vocab_size", None) or model.config.vocab_size  # a foreign model has one
    if not 0 <= size - len(tokenizer) < VaswaniTranslationPipeline.MOST_PADDING:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {size}: expected the same number."
        )
    if (largest := max(tokenizer.get_vocab().values())) >= size:
        raise ValueError(f"{name}: {TOKENIZER}: expected ids of the model's {size} tokens, found {largest}.")
    written = model.config.vocab_size
    if isinstance(tokenizer, TwoSidedTokenizer) and tokenizer.target_vocab_size > written:
        raise ValueError(
            f"{name}: {TOKENIZER_CONFIG}: {TARGET_VOCAB_SIZE}: expected at most the model's {written} tokens, found "
            f"{tokenizer.target_vocab_size}."
        )


@torch.no_grad()
def try_search(name: str, model: PreTrainedModel) -> None:
    """Generate two tokens if the checkpoint has search settings that `check_generation` has no rule for, so that
    invalid ones fail before the work begins.

    Raises:
        ValueError: The search fails with these settings.
    """
    settings = model.generation_config.to_diff_dict()
    if not (unchecked := unchecked_settings(settings)):
        return
    place = Path(name) / GENERATION if Path(name).is_dir() else f"{name}: {GENERATION}"
    with one_line_errors(f"{place}: {', '.join(unchecked)}", foreign_code=False):
        model.eval().generate(torch.tensor([[model.config.eos_token_id or 0]]), max_new_tokens=2)


def load_ensemble(
    names: list[str], dtype: str = "auto", device: torch.device | None = None, trust_remote_code: bool = False
) -> tuple[list[PreTrainedModel], PreTrainedTokenizerBase]:
    """Load the models of an ensemble and their shared tokenizer.

    Args:
        names (`list[str]`): One or more checkpoint folders or Hub repositories.
        dtype, device, trust_remote_code: See `load_checkpoint`.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: See `load_checkpoint`. Also: two checkpoints have different tokenizers.
    """
    models, tokenizers = zip(*(load_checkpoint(name, dtype, device, trust_remote_code) for name in names))
    for name, tokenizer in zip(names, tokenizers):
        if definition(tokenizer) != definition(tokenizers[0]):
            raise ValueError(
                f"{names[0]} and {name} have different tokenizers; the models of an ensemble must share one."
            )
    return list(models), tokenizers[0]


def source_limit(models: list[PreTrainedModel], requested: int | None = None) -> int:
    """Maximum source tokens of a line, end token included: the requested number, or else the limit of the models.

    Raises:
        ValueError: The requested number exceeds the learned positions of a model.
    """
    positions = min((limit for limit in map(position_limit, models) if limit is not None), default=None)
    if positions is not None and (requested or 0) > positions:
        raise ValueError(f"--max-source-tokens {requested}: the model's learned positions end at {positions}.")
    return requested or positions or MAX_SOURCE_TOKENS


def position_limit(model: PreTrainedModel) -> int | None:
    """Number of learned positions of a model; `None` for sinusoids, which have no limit."""
    if getattr(model.config, "position_embedding", None) != "learned":
        return None
    return model.config.max_position_embeddings
