"""Fields of another toolkit's configuration: checks of those with one possible value here, and search settings."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig


def check_fields(place: str | Path, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that is given and has another value than its only possible one.

    Args:
        place (`str` or `Path`): Origin of the configuration, for the message.
        values (`Mapping`): The configuration.
        fixed (`Mapping`): Possible values by field.
    """
    for name, expected in fixed.items():
        if (found := values.get(name, expected)) != expected:
            raise ValueError(f"{place}: {name}: a Vaswani model computes {name} {expected!r} only, found {found!r}.")


def check_equal(place: str | Path, values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for fields that differ between encoder and decoder."""
    for name in names:
        encoder, decoder = values[f"encoder_{name}"], values[f"decoder_{name}"]
        if encoder != decoder:
            raise ValueError(
                f"{place}: encoder_{name}, decoder_{name}: expected the same in both, found {encoder} and {decoder}."
            )


def check_unrestricted(toolkit: str, config: VaswaniConfig) -> None:
    """Raise ValueError for restricted self-attention, which another toolkit does not have."""
    if config.attention_window is not None:
        raise ValueError(
            f"{toolkit}: attention_window: expected none, as its self-attention sees all positions, "
            f"found {config.attention_window}."
        )


def search_fields(settings: GenerationConfig) -> dict[str, Any]:
    """Search settings that a checkpoint gives, without notes of the library."""
    fields = settings.to_diff_dict()
    return {
        name: value for name, value in fields.items() if name not in ("transformers_version", "_from_model_config")
    }
