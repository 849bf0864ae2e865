"""JSON records, validated on reading. Errors name the file and the field."""

import json
import reprlib
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassFieldValidationError


MAX_DIGITS = 30  # of an integer in a record; no valid count has more


def read_record(path: Path, schema: type[Any] | None = None) -> dict:
    """Read an object from a JSON file.

    Args:
        path (`Path`): File to read.
        schema (`type`, *optional*): `TypedDict` that describes the object. Additional fields are accepted.

    Raises:
        ValueError: The file does not hold such an object. The message names the file, the field, the value found and
            the type expected.
        OSError: The file cannot be read.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON object: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a JSON object, found {reprlib.repr(record)}.")
    if schema is not None:
        check_fields(record, schema, str(path))
    return record


def check_fields(record: dict, schema: type[Any], place: str) -> None:
    """Check the fields of an object against a `TypedDict`. Additional fields are ignored.

    Raises:
        ValueError: A field is missing or has the wrong type. The message begins with `place` and names the field.
    """
    known = {name: value for name, value in record.items() if name in schema.__annotations__}
    if missing := sorted(name for name in schema.__required_keys__ if name not in known):
        raise ValueError(f"{place}: no field {missing[0]!r}.")
    try:
        validate_typed_dict(schema, known)
    except (StrictDataclassFieldValidationError, RecursionError) as error:  # the repr of a deep value recurses
        raise ValueError(f"{place}: {' '.join(str(error).split()):.300}") from error


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
