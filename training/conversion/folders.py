"""Folders of conversions: where a source lies, which format it has, and how a converted checkpoint is written."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import file_exists, snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..inference.checkpoint_files import CONFIG, read_object
from ..inference.loading import check_vocabulary
from .agreement import Agreement, Conversion, compare, example_batch, shut_out
from .tokenizer_files import one_fast_tokenizer, with_source_rows


RECORD = "converted_from.json"
WEIGHTS = "model.safetensors"
OWN_FILES = ("npz", "fairseq")  # formats without a configuration of transformers
UNUSED = ["*/*", "*.h5", "*.msgpack", "*.ot"]  # other frameworks' weights


def find_source(source: str, revision: str | None = None) -> Path:
    """Folder of a checkpoint to convert, downloaded from the Hub if it is not a local folder.

    Args:
        source (`str`): Folder or Hub repository.
        revision (`str`, *optional*): Branch, tag or commit of the repository.

    Raises:
        NotADirectoryError: The source is a file.
        OSError: There is no such folder, and downloading it failed.
    """
    if Path(source).is_file():
        raise NotADirectoryError(f"{source}: expected a folder or a Hub repository, found a file.")
    if Path(source).is_dir():
        return Path(source)
    ignored = [*UNUSED]
    with contextlib.suppress(OSError, HFValidationError):  # without a network, the cache may have the repository
        ignored += ["*.bin"] if file_exists(source, WEIGHTS, revision=revision) else []
    try:
        return Path(snapshot_download(source, revision=revision, ignore_patterns=ignored))
    except (OSError, HFValidationError) as error:
        text = " ".join(str(error).split())
        raise OSError(f"{source}: no such folder, and downloading it from the Hub failed: {text}") from error


def recognise(folder: Path, formats: tuple[str, ...], wanted: str | None = None) -> str:
    """Format of a checkpoint: the `model_type` of its configuration, or that of a toolkit's own files.

    Args:
        folder (`Path`): The checkpoint.
        formats (`tuple[str, ...]`): Known formats.
        wanted (`str`, *optional*): The only format to accept.

    Raises:
        ValueError: The format is unknown, or not the wanted one.
    """
    formats = formats if wanted is None else (wanted,)
    if (folder / CONFIG).is_file() and wanted not in OWN_FILES:
        kind = read_object(folder / CONFIG).get("model_type")
        if kind not in formats:
            raise ValueError(f"{folder / CONFIG}: model_type: expected one of {', '.join(formats)}, found {kind!r}.")
        return kind
    if wanted is not None:
        return wanted
    if any(folder.glob("*.npz")):
        return "npz"
    if any(folder.glob("*.pt")):
        return "fairseq"
    raise ValueError(f"{folder}: expected a {CONFIG}, a .npz of Marian or a .pt of fairseq, found none.")


def write_checked(conversion: Conversion, partial: Path, record: dict) -> tuple[Agreement, str, str]:
    """Write a converted model as a checkpoint, and compare it with the original one.

    Args:
        conversion (`Conversion`): Model, reference and tokenizer files.
        partial (`Path`): Empty folder to write into.
        record (`dict`): Origin of the model, for `converted_from.json`, which also gets the agreement.

    Returns:
        The agreement, what it was measured on, and what became of the tokenizer.

    Raises:
        ValueError: The models disagree, or the tokenizer does not fit.
    """
    model = conversion.model
    tokenizer, rows, files, outcome = one_fast_tokenizer(conversion.tokenizer_files)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
        model = model if rows is None else with_source_rows(model, rows)
        measured_on = "text"
    else:
        for name, content in files.items():
            (partial / name).write_bytes(content)
        tokenizer, measured_on = _load_tokenizer(partial, bool(files))
    if tokenizer is not None:
        check_vocabulary(record["source"], model, tokenizer)
    batch = example_batch(model, tokenizer)
    agreement = compare(conversion.reference, model, batch, shut_out(conversion.reference), rows)
    agreement.check(record["source"])
    model.save_pretrained(partial)
    record = {**record, "checked_on": measured_on, "tokenizer": outcome, **asdict(agreement)}
    (partial / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return agreement, measured_on, outcome


def _load_tokenizer(folder: Path, has_files: bool) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer if it loads, and what it lets a comparison be made on."""
    if not has_files:
        return None, "random tokens, as there is no tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any class: the library wraps what its dependencies raise
        return None, f"random tokens, as the tokenizer does not load: {' '.join(str(error).split())[:200]}"
    return tokenizer, "text"
