"""Record of a conversion from another toolkit: in the converted checkpoint, and in the runs that start from it."""

from pathlib import Path
from typing import NotRequired, TypedDict

from ..json_records import read_record


ORIGIN = "converted_from.json"


class Origin(TypedDict):
    """Fields of `converted_from.json`.

    Attributes:
        source (`str`): Folder or Hub repository, as it was named.
        revision (`str`, *optional*): Revision that was asked for.
        repository (`str`, *optional*): The Hub repository; `None` for a folder.
        commit (`str`, *optional*): Commit of the repository.
        format (`str`): Format of the original model.
        as_trained (`bool`): Positions and ε of layer normalisation are those of Marian's training.
        license, license_name, license_link (`str`, *optional*): Licence in the metadata of the original's README.md.
        languages (`list[str]`, *optional*): Languages in the same metadata.
        checked_on (`str`): Input of the comparison with the original.
        compared (`str`): Logits, or log probabilities.
        sentences, equal (`int`): Compared sentences, and those whose best translations are equal.
        logits (`float`): Greatest difference, relative to the greatest value.
        tokenizer (`str`): What became of the tokenizer.
    """

    source: str
    revision: NotRequired[str | None]
    repository: NotRequired[str | None]
    commit: NotRequired[str | None]
    format: str
    as_trained: NotRequired[bool]
    license: NotRequired[str | None]
    license_name: NotRequired[str | None]
    license_link: NotRequired[str | None]
    languages: NotRequired[list[str] | None]
    checked_on: str
    compared: str
    sentences: int
    equal: int
    logits: int | float
    tokenizer: str


def read_origin(folder: Path) -> Origin | None:
    """Record of the conversion that made a checkpoint; `None` for other checkpoints.

    Raises:
        ValueError: The record is malformed. The message names file and field.
    """
    path = folder / ORIGIN
    return read_record(path, Origin) if path.is_file() else None
