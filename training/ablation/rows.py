"""Rows of the paper's Table 3, for another base model."""

from fractions import Fraction

from huggingface_hub.errors import StrictDataclassError

from hf_vaswani import TABLE_3, VaswaniConfig

from ..trainer.arguments import ModelArguments
from ..trainer.manifest import model_fields


WIDTHS = ("d_model", "d_ff", "d_k", "d_v")
COUNTED = ("encoder_layers", "decoder_layers", "num_heads", *WIDTHS)


# The rows


def named_rows(names: list[str]) -> list[str]:
    """Rows of Table 3, in its order: by their names, by the letter of a group, or `all` of them but big.

    Raises:
        ValueError: No such row.

    >>> named_rows(["E", "B-dk16", "base"])
    ['base', 'B-dk16', 'E-learned']
    """
    chosen = set()
    for name in names:
        found = [row for row in TABLE_3 if name in (row, row.partition("-")[0]) or (name == "all" and row != "big")]
        if not found:
            raise ValueError(f"--rows {name}: Table 3 has all, A, B, C, D, E, {', '.join(TABLE_3)}.")
        chosen.update(found)
    return [row for row in TABLE_3 if row in chosen]


def base_config(model_args: ModelArguments, scale: Fraction = Fraction(1)) -> VaswaniConfig:
    """The model that takes the place of the base model: the recipe's, with its widths times `scale`.

    Raises:
        ValueError: The recipe's model is not the base model with overrides, or a width would not be whole.
    """
    if model_args.model != "base" or model_args.init_from:
        name, value = ("init_from", model_args.init_from) if model_args.init_from else ("model", model_args.model)
        raise ValueError(f"{name}={value}: the rows of Table 3 are changes of a fresh base model (model: base).")
    overrides = model_args.model_overrides or {}
    try:
        fields = model_fields(VaswaniConfig.from_table3("base", **overrides))
        return VaswaniConfig(**fields | {name: _whole(fields[name], scale, "base", name) for name in WIDTHS})
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"model_overrides {overrides}, --scale {scale}: {' '.join(str(error).split())}") from error


def row_config(base: VaswaniConfig, row: str) -> VaswaniConfig:
    """What a row of Table 3 is for another base model.

    Args:
        base (`VaswaniConfig`): Takes the place of the paper's base model.
        row (`str`): A key of `TABLE_3`.

    Raises:
        ValueError: A number would not be whole, or the row would be the base model once more.

    >>> row_config(VaswaniConfig(d_model=128, d_ff=512, num_heads=8), "C-ff4096").d_ff
    1024
    """
    paper, paper_base = (model_fields(VaswaniConfig.from_table3(name)) for name in (row, "base"))
    fields = model_fields(base)
    changed = {name: value for name, value in paper.items() if value != paper_base[name]}
    for name in changed.keys() & set(COUNTED):
        changed[name] = _whole(fields[name], Fraction(paper[name], paper_base[name]), row, name)
    if row != "base" and changed.items() <= fields.items():
        same = ", ".join(f"{name} {value}" for name, value in changed.items())
        raise ValueError(f"Row {row} would not differ from base, which has {same} already.")
    try:
        return VaswaniConfig(**fields | changed)
    except StrictDataclassError as error:
        raise ValueError(f"Row {row}: {' '.join(str(error).split())}") from error


def _whole(value: int, factor: Fraction, row: str, name: str) -> int:
    scaled = value * factor
    if scaled.denominator != 1:
        raise ValueError(f"Row {row}: {name} would be {value} x {factor} = {scaled}, which is not a whole number.")
    return int(scaled)
