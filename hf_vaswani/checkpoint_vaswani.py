"""Checkpoints that notice damage: weights are saved with their checksums, and loaded only if they still have them.

A safetensors file that was cut short does not open, but one with a flipped bit does, and gives another model. A file
of another size than was saved has been replaced, which is nobody's damage.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from .int8_vaswani import Int8Linear


CHECKSUMS_NAME = "checksums.json"


def weight_checksums(folder: str | os.PathLike) -> dict[str, dict]:
    """The size in bytes and the SHA-256 of every file of model weights in a folder, by file name."""
    checksums = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        checksums[path.name] = {"size": path.stat().st_size, "sha256": digest}
    return checksums


def check_weights(folder: str | os.PathLike) -> None:
    """Compares the weights in a folder with its checksums, if it has any.

    Raises:
        OSError: A file of weights is not the one that was saved.
    """
    folder = Path(folder)
    if not (folder / CHECKSUMS_NAME).is_file():
        return
    saved = json.loads((folder / CHECKSUMS_NAME).read_text(encoding="utf-8"))
    for name, found in weight_checksums(folder).items():
        expected = saved.get(name, found)
        if found["size"] == expected["size"] and found["sha256"] != expected["sha256"]:
            raise OSError(
                f"{folder / name} is damaged: its SHA-256 is {found['sha256']}, and {CHECKSUMS_NAME} says "
                f"{expected['sha256']}. Get it again; if it was changed on purpose, delete {folder / CHECKSUMS_NAME}."
            )


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
        if is_main_process:
            Path(save_directory, CHECKSUMS_NAME).unlink(missing_ok=True)  # of the weights that are replaced now
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self._write_checksums(save_directory)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        self._write_checksums(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    @staticmethod
    def _write_checksums(folder: str | os.PathLike) -> None:
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if in_group and torch.distributed.get_rank() != 0:
            return
        if checksums := weight_checksums(folder):
            Path(folder, CHECKSUMS_NAME).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args, **kwargs):
        """As [`~transformers.PreTrainedModel.from_pretrained`]; checks the weights.

        Raises:
            OSError: A file of weights is damaged or missing.
            ValueError: Weights of another format than safetensors are asked for.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: this model reads its weights from safetensors files only.")
        source = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
        source = {name: kwargs[name] for name in source if name in kwargs}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True})
        if pretrained_model_name_or_path is not None:
            checksums = cached_file(
                pretrained_model_name_or_path,
                CHECKSUMS_NAME,
                **source,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if checksums is not None:
                check_weights(Path(checksums).parent)
        return loaded


__all__ = ["VaswaniCheckpointMixin", "check_weights"]
