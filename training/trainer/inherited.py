"""Fields of a recipe that transformers defines: those of `Seq2SeqTrainingArguments` that `fields` does not replace."""

import argparse
from collections.abc import Collection
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints

from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from ..options import OptionGroup
from .command_line import METAVARS, with_default


# Fields that must keep their defaults, because batches are formed by length and by token budgets.
WITHOUT_EFFECT = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "train_sampling_strategy": "random",
    "auto_find_batch_size": False,
    "dataloader_drop_last": False,
}
REFUSED = {*WITHOUT_EFFECT, "label_smoothing_factor", "resume_from_checkpoint", "enable_jit_checkpoint"}


class _Options(HfArgumentParser):
    """Adds the options of a dataclass to a group of another parser, under one spelling each.

    Args:
        group (`argparse` group): Group to add to.
        dataclass (`type`): Dataclass of the options.
    """

    def __init__(self, group: OptionGroup, dataclass: type):
        self.group = group
        super().__init__(dataclass, add_help=False)

    def add_argument(self, *names: str, **options) -> argparse.Action:
        name = names[0].removeprefix("--")
        text = with_default(options.get("help") or "", options.pop("default", None))
        # The opposite of an option, --no_..., would have the text of the option.
        options["help"] = argparse.SUPPRESS if name.startswith("no_") or name in REFUSED else text
        if "choices" not in options and options.get("action") is None:
            options["metavar"] = METAVARS.get(options.get("type"), METAVARS[bool])
        return self.group.add_argument(f"--{name}", **options)


def inherited_types(own: Collection[str]) -> dict[str, Any]:
    """Types of the fields of transformers, by name, without those in `own`."""
    types = get_type_hints(Seq2SeqTrainingArguments)
    return {f.name: types[f.name] for f in fields(Seq2SeqTrainingArguments) if f.init and f.name not in own}


def add_inherited(group: OptionGroup, own: Collection[str]) -> None:
    """Add the options of the fields of transformers to a group, without those in `own`."""
    types = inherited_types(own)
    # A class of its own, because HfArgumentParser modifies the types in the fields.
    copies = [
        (f.name, types[f.name], field(default=f.default, default_factory=f.default_factory, metadata=f.metadata))
        for f in fields(Seq2SeqTrainingArguments)
        if f.name in types
    ]
    _Options(group, make_dataclass("Inherited", copies))
