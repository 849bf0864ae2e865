"""Checksums of weights and configurations: they are saved beside them, and damaged weights do not load.

A truncated safetensors file does not open, but one with a flipped bit does, and gives another model. A file of
another size than the saved one was replaced on purpose, and loads. The stock Trainer when it resumes, and PEFT when
it loads an adapter, read weights without this check.

Another `config.json` makes another model of the same weights: any change is an error. Users may edit
`generation_config.json`, the settings of the search: a change is a warning. Saving the model again renews both
checksums. Checkpoints of earlier versions have neither, and load.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import create_repo, upload_folder
from transformers.utils.hub import cached_file, create_and_tag_model_card

from .kernels_vaswani import Int8Linear


logger = logging.getLogger(__name__)

CHECKSUMS_NAME = "checksums.json"
CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HUB_OPTIONS = ("commit_message", "create_pr", "private", "repo_id")  # of `save_pretrained(push_to_hub=True)`


def weight_files(folder: str | os.PathLike) -> dict[str, Path]:
    """Files of model weights in a folder, and their index, by name."""
    return {path.name: path for path in sorted(Path(folder).glob("model*.safetensors*")) if path.is_file()}


def checked_files(folder: str | os.PathLike) -> dict[str, Path]:
    """Files in a folder that have checksums, by name: weights and configurations."""
    configurations = {name: Path(folder, name) for name in (CONFIG_NAME, GENERATION_NAME)}
    return weight_files(folder) | {name: path for name, path in configurations.items() if path.is_file()}


def checksum(path: Path) -> dict:
    """Size in bytes and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_checksums(folder: str | os.PathLike, name: str = CHECKSUMS_NAME) -> dict[str, dict] | None:
    """Read `checksums.json` in a folder, or another file of its form; `None` if there is none.

    Raises:
        OSError: The file does not have that form.
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
    """Compare weights and configurations in a folder with its checksums, if it has any.

    Raises:
        OSError: A file of weights is damaged, or was not saved here; or `config.json` has changed.
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
            f"{path} is not the one that was saved with the weights: its SHA-256 is {found}, in {CHECKSUMS_NAME} "
            f"{saved[CONFIG_NAME]['sha256']}. Get it again; if it was changed on purpose, remove {CONFIG_NAME} from "
            f"{CHECKSUMS_NAME}, and save the model again to renew that."
        )
    path = folder / GENERATION_NAME
    if GENERATION_NAME in saved and path.is_file() and checksum(path) != saved[GENERATION_NAME]:
        logger.warning("%s was changed after the model was saved. Saving it again renews %s.", path, CHECKSUMS_NAME)


def check_index(path: str | os.PathLike) -> None:
    """Refuse the index of a sharded model that names other files than safetensors ones.

    Raises:
        OSError: The file names others, or is no index.
    """
    try:
        names = set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].values())
        foreign = sorted(name for name in names if not name.endswith(".safetensors"))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise OSError(f"{path} is not an index of weights: {type(error).__name__}: {error}.") from error
    if foreign:
        raise OSError(f"{path} names {', '.join(foreign)}: this model reads its weights from safetensors files only.")


class VaswaniChecksumsMixin:
    """`save_pretrained` and `from_pretrained` with checksums, of safetensors files only: no pickle is ever read."""

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, push_to_hub: bool = False, **kwargs
    ) -> None:
        """As [`~transformers.PreTrainedModel.save_pretrained`]; adds `checksums.json`.

        Raises:
            ValueError: The model's linear layers are 8-bit ones.
        """
        if any(isinstance(module, Int8Linear) for module in self.modules()):
            raise ValueError(
                "An 8-bit model cannot be saved: save the one it was made from, and call to_int8() on it."
            )
        hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if push_to_hub and name in kwargs}
        before = _versions(save_directory)
        with _own_generation_config(self):
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process and _is_first_process():
            _remove_replaced(save_directory, before)
            _write_checksums(save_directory, before)
            if push_to_hub:
                self._push_written(save_directory, before, token=kwargs.get("token"), **hub)

    def _push_written(
        self, folder, before: dict, token, repo_id=None, commit_message="Upload model", create_pr=False, **repository
    ) -> None:
        """Upload the files that were written, in one commit, the checksums among them."""
        folder = Path(folder)
        repo_id = create_repo(repo_id or folder.name, token=token, exist_ok=True, **repository).repo_id
        create_and_tag_model_card(repo_id, self.model_tags, token=token).save(folder / "README.md")
        upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=[name for name, version in _versions(folder).items() if before.get(name) != version],
            commit_message=commit_message,
            token=token,
            create_pr=create_pr,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args, **kwargs):
        """As [`~transformers.PreTrainedModel.from_pretrained`]; checks the weights.

        Raises:
            OSError: A file of weights is damaged, missing, or no safetensors file.
            ValueError: Weights of another format than safetensors are asked for.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: this model reads its weights from safetensors files only.")
        options = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
        source = {name: kwargs[name] for name in options if name in kwargs}
        if (index := _find(pretrained_model_name_or_path, INDEX_NAME, source)) is not None:
            check_index(index)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True})
        if (checksums := _find(pretrained_model_name_or_path, CHECKSUMS_NAME, source)) is not None:
            check_weights(Path(checksums).parent)
        return loaded


@contextmanager
def _own_generation_config(model) -> Iterator[None]:
    """Save the generation configuration without transformers' underscored metadata.

    They mark one that was made from the model's configuration, and of such a one transformers loads no added fields.
    """
    if not model.can_generate():
        yield
        return
    config = model.generation_config
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    model.generation_config = type(config)(**fields)
    try:
        yield
    finally:
        model.generation_config = config


def _remove_replaced(folder: str | os.PathLike, before: dict) -> None:
    """Remove an earlier model's single file, which transformers leaves beside new shards and loads instead of them."""
    files = weight_files(folder)
    written = {name for name, path in files.items() if before.get(name) != _version(path)}
    if INDEX_NAME in written and SINGLE_NAME in files.keys() - written:
        files[SINGLE_NAME].unlink()


def _write_checksums(folder: str | os.PathLike, before: dict) -> None:
    """Write the checksums of the new files; entries of others stay."""
    files = checked_files(folder)
    if not weight_files(folder):
        return
    try:
        earlier = read_checksums(folder) or {}
    except OSError:
        earlier = {}
    checksums = {
        name: earlier[name] if name in earlier and before.get(name) == _version(path) else checksum(path)
        for name, path in files.items()
    }
    Path(folder, CHECKSUMS_NAME).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")


def _is_first_process() -> bool:
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not in_group or torch.distributed.get_rank() == 0


def _find(model: str | os.PathLike | None, name: str, source: dict) -> str | None:
    """A file of a checkpoint, if it is there; the library says why a whole repository cannot be had."""
    try:
        return None if model is None else cached_file(model, name, **source)
    except OSError:
        return None


def _versions(folder: str | os.PathLike) -> dict[str, tuple[int, int]]:
    """Versions of the files in a folder, by name."""
    return {path.name: _version(path) for path in Path(folder).glob("*") if path.is_file()}


def _version(path: Path) -> tuple[int, int]:
    """Number that changes when a file is written."""
    return path.stat().st_mtime_ns, path.stat().st_ino


__all__ = ["VaswaniChecksumsMixin", "check_weights"]
