"""Folders of conversions: where a source lies, which format it has, and how a converted checkpoint is written."""

import contextlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import file_exists, metadata_load, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..inference.checkpoint_files import CONFIG, one_line_errors, read_object
from ..inference.loading import check_vocabulary
from ..inference.origin import ORIGIN
from .agreement import Agreement, Conversion, compare, example_batch, shut_out
from .tokenizer_files import one_fast_tokenizer, with_source_rows


logger = logging.getLogger(__name__)


CARD = "README.md"
LICENSE_FIELDS = ("license", "license_name", "license_link")
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
        if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            raise OSError(
                f"{source}: no such folder, and no such Hub repository. A private one needs a token with access to "
                "it: run `hf auth login`, or set HF_TOKEN."
            ) from error
        if isinstance(error, RevisionNotFoundError):
            raise OSError(f"{source}: --revision {revision}: the Hub repository has no such revision.") from error
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


def write_checked(conversion: Conversion, folder: Path, partial: Path, record: dict) -> tuple[Agreement, str, str]:
    """Write a converted model as a checkpoint, and compare it with the original one.

    Args:
        conversion (`Conversion`): Model, reference and tokenizer files.
        folder (`Path`): The original checkpoint.
        partial (`Path`): Empty folder to write into.
        record (`dict`): Origin of the model, for `converted_from.json`, which also gets the agreement and the facts of
            `describe_original`.

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
    record |= describe_original(record["source"], folder)
    record |= {"checked_on": measured_on, "tokenizer": outcome, **asdict(agreement)}
    (partial / ORIGIN).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return agreement, measured_on, outcome


def describe_original(source: str, folder: Path) -> dict[str, str | list[str] | None]:
    """Repository and commit of an original model on the Hub; licence and languages in the metadata of its README.md.

    Facts that the metadata lack are `None`. So are those that it has in another form than the Hub's; a warning names
    the field.

    Args:
        source (`str`): The original as it was named.
        folder (`Path`): Its folder, from `find_source`.
    """
    is_local = Path(source).is_dir()
    place = {"repository": None, "commit": None} if is_local else {"repository": source, "commit": folder.name}
    card, facts = folder / CARD, {}
    if card.is_file():
        try:
            with one_line_errors(card, foreign_code=False):
                facts = metadata_load(card) or {}
        except (OSError, ValueError) as error:
            logger.warning("%s: licence and languages are not recorded.", error)
    described = {name: _text_of(card, name, facts.get(name)) for name in LICENSE_FIELDS}
    return {**place, **described, "languages": _languages_of(card, facts.get("language"))}


def _text_of(card: Path, name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    logger.warning("%s: %s: expected text, found %.100r; it is not recorded.", card, name, value)
    return None


def _languages_of(card: Path, value: object) -> list[str] | None:
    codes = value if isinstance(value, list) or value is None else [value]
    codes = codes and ["no" if code is False else code for code in codes]  # YAML takes Norwegian's code for a boolean
    if codes is None or all(isinstance(code, str) for code in codes):
        return codes
    logger.warning("%s: language: expected codes, found %.100r; they are not recorded.", card, value)
    return None


def _load_tokenizer(folder: Path, has_files: bool) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer if it loads, and what it lets a comparison be made on."""
    if not has_files:
        return None, "random tokens, as there is no tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any class: the library wraps what its dependencies raise
        return None, f"random tokens, as the tokenizer does not load: {' '.join(str(error).split())[:200]}"
    return tokenizer, "text"
