"""Checkpoints that notice damage: weights are saved with their checksums, and loaded only if they still have them.

A safetensors file that was cut short does not open, but one with a flipped bit does, and gives another model. A file
of another size than was saved has been replaced, which is nobody's damage.

`config.json` has a checksum too: with another one the weights are another model, so any change is an error.
`generation_config.json` says how to search, which a user may change by hand: a change is a warning. Saving the model
again renews both. Checkpoints of earlier versions have neither checksum, and load as before.

When the stock Trainer resumes, and when PEFT loads an adapter, they read the weights themselves, without this check.
"""

import hashlib
import json
import logging
import os
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from .int8_vaswani import Int8Linear


logger = logging.getLogger(__name__)


CHECKSUMS_NAME = "checksums.json"
CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def weight_files(folder: str | os.PathLike) -> dict[str, Path]:
    """The files of model weights in a folder, and their index, by name."""
    return {path.name: path for path in sorted(Path(folder).glob("model*.safetensors*")) if path.is_file()}


def checked_files(folder: str | os.PathLike) -> dict[str, Path]:
    """The files in a folder that have checksums, by name: weights and configurations."""
    configurations = {name: Path(folder, name) for name in (CONFIG_NAME, GENERATION_NAME)}
    return weight_files(folder) | {name: path for name, path in configurations.items() if path.is_file()}


def checksum(path: Path) -> dict:
    """A file's size in bytes and its SHA-256."""
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_checksums(folder: str | os.PathLike, name: str = CHECKSUMS_NAME) -> dict[str, dict] | None:
    """What `checksums.json` in a folder says, or another file like it; `None` if there is none.

    Raises:
        OSError: It says nothing that can be understood.
    """
    path = Path(folder, name)
    if not path.is_file():
        return None
    try:
        checksums = json.loads(path.read_text(encoding="utf-8"))
        return {name: {"size": entry["size"], "sha256": entry["sha256"]} for name, entry in checksums.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise OSError(f"{path} is damaged: {type(error).__name__}: {error}. Get it again, or delete it.") from error


def check_weights(folder: str | os.PathLike) -> None:
    """Compares weights and configurations in a folder with its checksums, if it has any.

    Raises:
        OSError: A file of weights or `config.json` is not the one that was saved.
    """
    saved = read_checksums(folder)
    _check_configurations(Path(folder), saved or {})
    for name, path in weight_files(folder).items() if saved is not None else ():
        if name not in saved:
            raise OSError(
                f"{path} does not belong to the weights that were saved here: {CHECKSUMS_NAME} names "
                f"{', '.join(saved)}. Remove it, or {CHECKSUMS_NAME} if it was added on purpose."
            )
        if path.stat().st_size != saved[name]["size"]:
            continue
        if (found := checksum(path)["sha256"]) != saved[name]["sha256"]:
            raise OSError(
                f"{path} is damaged: its SHA-256 is {found}, and {CHECKSUMS_NAME} says {saved[name]['sha256']}. "
                f"Get it again (from the Hub: force_download=True); if it was changed on purpose, delete "
                f"{path.with_name(CHECKSUMS_NAME)}."
            )


def _check_configurations(folder: Path, saved: dict[str, dict]) -> None:
    path = folder / CONFIG_NAME
    if CONFIG_NAME in saved and path.is_file() and (found := checksum(path)["sha256"]) != saved[CONFIG_NAME]["sha256"]:
        raise OSError(
            f"{path} is not the one that was saved with the weights: its SHA-256 is {found}, and {CHECKSUMS_NAME} has "
            f"{saved[CONFIG_NAME]['sha256']}. Get it again; if it was changed on purpose, remove {CONFIG_NAME} from "
            f"{CHECKSUMS_NAME}, and save the model again to renew that."
        )
    path = folder / GENERATION_NAME
    if GENERATION_NAME in saved and path.is_file() and checksum(path) != saved[GENERATION_NAME]:
        logger.warning("%s was changed after the model was saved. Saving it again renews %s.", path, CHECKSUMS_NAME)


def check_index(path: str | os.PathLike) -> None:
    """Raises OSError where the index of a sharded model names anything but safetensors files."""
    try:
        names = set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].values())
        foreign = sorted(name for name in names if not name.endswith(".safetensors"))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise OSError(f"{path} is not an index of weights: {type(error).__name__}: {error}.") from error
    if foreign:
        raise OSError(f"{path} names {', '.join(foreign)}: this model reads its weights from safetensors files only.")


class VaswaniCheckpointMixin:
    """`save_pretrained` and `from_pretrained` with checksums, and of safetensors only: no pickle is ever read."""

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs) -> None:
        """As [`~transformers.PreTrainedModel.save_pretrained`]; adds `checksums.json`.

        Raises:
            ValueError: The model's linear layers have become 8-bit ones.
        """
        if any(isinstance(module, Int8Linear) for module in self.modules()):
            raise ValueError(
                "An 8-bit model cannot be saved: save the one it was made from, and call to_int8() on it."
            )
        self._weights_before = {name: _version(path) for name, path in checked_files(save_directory).items()}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self._remove_replaced(save_directory)
            self._write_checksums(save_directory)

    def _remove_replaced(self, folder: str | os.PathLike) -> None:
        """The library leaves an earlier model's single file beside new shards, and would load it instead of them."""
        files = weight_files(folder)
        written = {name for name, path in files.items() if self._weights_before.get(name) != _version(path)}
        if INDEX_NAME in written and SINGLE_NAME in files.keys() - written:
            files[SINGLE_NAME].unlink()

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        self._write_checksums(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _write_checksums(self, folder: str | os.PathLike) -> None:
        """Of the files that were written now; what was said of others stays."""
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        files = checked_files(folder)
        if not weight_files(folder) or (in_group and torch.distributed.get_rank() != 0):
            return
        try:
            earlier = read_checksums(folder) or {}
        except OSError:
            earlier = {}
        checksums = {
            name: earlier[name]
            if name in earlier and self._weights_before.get(name) == _version(path)
            else checksum(path)
            for name, path in files.items()
        }
        Path(folder, CHECKSUMS_NAME).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args, **kwargs):
        """As [`~transformers.PreTrainedModel.from_pretrained`]; checks the weights.

        Raises:
            OSError: A file of weights is damaged or missing, or is no safetensors file.
            ValueError: Weights of another format than safetensors are asked for.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: this model reads its weights from safetensors files only.")
        source = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
        source = {name: kwargs[name] for name in source if name in kwargs}

        def find(name: str) -> str | None:
            if pretrained_model_name_or_path is None:
                return None
            return cached_file(
                pretrained_model_name_or_path,
                name,
                **source,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                _raise_exceptions_for_gated_repo=False,
            )

        if (index := _found(find, INDEX_NAME)) is not None:
            check_index(index)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True})
        if (checksums := _found(find, CHECKSUMS_NAME)) is not None:
            check_weights(Path(checksums).parent)
        return loaded


def _found(find, name: str) -> str | None:
    """The file, if it is there; why a whole repository cannot be had is for the library to say."""
    try:
        return find(name)
    except OSError:
        return None


def _version(path: Path) -> tuple[int, int]:
    """Changes when a file is written."""
    return path.stat().st_mtime_ns, path.stat().st_ino


__all__ = ["VaswaniCheckpointMixin", "check_weights"]
