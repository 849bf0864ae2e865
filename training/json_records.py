"""Records in JSON, checked as they are read; errors name file and field."""

import json
import reprlib
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassFieldValidationError


DIGITS = 30  # of an integer in a record; what has more is no number that anything here has counted


def read_record(path: Path, schema: type[Any] | None = None) -> dict:
    """An object from a JSON file.

    Args:
        path (`Path`): File to read.
        schema (`type`, *optional*): A `TypedDict` with the fields that the object is to have, beside others.

    Raises:
        ValueError: It is no such object; the message names file and field, what was found and what was expected.
        OSError: The file cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON object: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {reprlib.repr(found)}.")
    if schema is not None:
        check_fields(found, schema, str(path))
    return found


def check_fields(found: dict, schema: type[Any], place: str) -> None:
    """Compares the fields of an object with a `TypedDict`; fields that it does not know are not looked at.

    Raises:
        ValueError: A field is missing or of another type; the message names it, and begins with `place`.
    """
    known = {name: value for name, value in found.items() if name in schema.__annotations__}
    if missing := sorted(name for name in schema.__required_keys__ if name not in known):
        raise ValueError(f"{place}: no field {missing[0]!r}.")
    try:
        validate_typed_dict(schema, known)
    except (StrictDataclassFieldValidationError, RecursionError) as error:  # the repr of a deep value recurses
        raise ValueError(f"{place}: {' '.join(str(error).split()):.300}") from error


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
