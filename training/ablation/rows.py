"""Rows of Table 3 of the paper, applied to another base model."""

from fractions import Fraction

from huggingface_hub.errors import StrictDataclassError

from hf_vaswani import TABLE_3, VaswaniConfig

from ..trainer.arguments import ModelArguments
from ..trainer.manifest import model_fields


WIDTHS = ("d_model", "d_ff", "d_k", "d_v")
COUNTED = ("encoder_layers", "decoder_layers", "num_heads", *WIDTHS)


def named_rows(names: list[str]) -> list[str]:
    """Select rows of Table 3, in its order.

    Args:
        names (`list[str]`): Names of rows, letters of groups, or `all` for every row except big.

    Raises:
        ValueError: Table 3 has no such row.

    >>> named_rows(["E", "B-dk16", "base"])
    ['base', 'B-dk16', 'E-learned']
    """
    selected = set()
    for name in names:
        matches = [row for row in TABLE_3 if name in (row, row.partition("-")[0]) or (name == "all" and row != "big")]
        if not matches:
            raise ValueError(f"--rows {name}: no such row, expected all, A, B, C, D, E, {', '.join(TABLE_3)}.")
        selected.update(matches)
    return [row for row in TABLE_3 if row in selected]


def base_config(model_args: ModelArguments, scale: Fraction = Fraction(1)) -> VaswaniConfig:
    """Base model of an ablation: the recipe's model with all widths multiplied by `scale`.

    Raises:
        ValueError: The recipe's model is not the base model with overrides, or a scaled width is not an integer.
    """
    if model_args.model != "base" or model_args.init_from:
        name, value = ("init_from", model_args.init_from) if model_args.init_from else ("model", model_args.model)
        raise ValueError(
            f"{name}={value}: the rows of Table 3 modify a new base model, expected model=base and no init_from."
        )
    overrides = model_args.model_overrides or {}
    try:
        fields = model_fields(VaswaniConfig.from_table3("base", **overrides))
        return VaswaniConfig(**fields | {name: _scaled_size(fields[name], scale, "base", name) for name in WIDTHS})
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"model_overrides {overrides}, --scale {scale}: {' '.join(str(error).split())}") from error


def row_config(base: VaswaniConfig, row: str) -> VaswaniConfig:
    """Configuration of a row of Table 3 for another base model. Sizes change by the same factor as in the paper.

    Args:
        base (`VaswaniConfig`): Configuration that replaces the paper's base model.
        row (`str`): Key of `TABLE_3`.

    Raises:
        ValueError: A size is not an integer, or the row does not differ from base.

    >>> row_config(VaswaniConfig(d_model=128, d_ff=512, num_heads=8), "C-ff4096").d_ff
    1024
    """
    paper, paper_base = (model_fields(VaswaniConfig.from_table3(name)) for name in (row, "base"))
    fields = model_fields(base)
    changed = {name: value for name, value in paper.items() if value != paper_base[name]}
    for name in changed.keys() & set(COUNTED):
        changed[name] = _scaled_size(fields[name], Fraction(paper[name], paper_base[name]), row, name)
    if row != "base" and changed.items() <= fields.items():
        same = ", ".join(f"{name} {value}" for name, value in changed.items())
        raise ValueError(f"Row {row} would not differ from base, which already has {same}.")
    try:
        return VaswaniConfig(**fields | changed)
    except StrictDataclassError as error:
        raise ValueError(f"Row {row}: {' '.join(str(error).split())}") from error


def _scaled_size(value: int, factor: Fraction, row: str, name: str) -> int:
    scaled = value * factor
    if scaled.denominator != 1:
        raise ValueError(f"Row {row}: {name} would be {value} x {factor} = {scaled}, which is not an integer.")
    return int(scaled)
