"""Draw what a model attends to."""

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model computes attention in the form that returns its weights, for as long as this lasts."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_number(name: str, number: int, highest: int) -> int:
    """`number`, of a layer or a head, which are counted from 1.

    Raises:
        ValueError: There is none of that number.
    """
    if not 1 <= number <= highest:
        raise ValueError(f"{name} must be from 1 to {highest}, got {number}.")
    return number
