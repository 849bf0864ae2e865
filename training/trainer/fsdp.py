"""Weights that FSDP2 divides among devices: their checkpoints are the ordinary ones, for any number of devices."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
EVERYWHERE = StateDictOptions(full_state_dict=True, strict=False)


@contextlib.contextmanager
def embeddings_in_root(model: PreTrainedModel) -> Iterator[None]:
    """Within, Accelerate makes no units of FSDP2 of the embeddings: they stay in that of the whole model.

    The embedding is one matrix of four modules, and Accelerate would put two of them into a unit of their own, which
    PyTorch refuses. The loss reads the matrix without a call of its module, which would not gather a unit either.
    """
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings


@contextlib.contextmanager
def gathered(model: PreTrainedModel, reshard_after_forward: bool) -> Iterator[None]:
    """Within, each device has all weights of a model that FSDP2 divides, so that it may run alone, as in decoding
    sentences of its own. Changes nothing of another model.

    Args:
        model (`PreTrainedModel`): Whose weights to gather.
        reshard_after_forward (`bool`): Whether its layers give up their weights between forward and backward, which
            holds again afterwards.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(reshard_after_forward and unit is not model, recurse=False)


@contextlib.contextmanager
def in_its_own_class(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model that FSDP2 divides is of the class that it was: `save_pretrained` puts the code of a model's
    class beside its weights, and that of FSDP2's is PyTorch's."""
    divided = type(model)
    if isinstance(model, FSDPModule):
        model.__class__ = divided.__bases__[1]  # the first is FSDPModule
    try:
        yield
    finally:
        model.__class__ = divided


def are_finite(weights: list[nn.Parameter]) -> list[bool]:
    """Whether each weight is finite in all of its elements, on whichever device they are. All processes must ask."""
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    finite = torch.stack([part.detach().isfinite().all() for part in parts]).int()
    if any(isinstance(weight, DTensor) for weight in weights):
        torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
    return finite.bool().tolist()


def load_weights(model: PreTrainedModel, folder: str | Path) -> NamedTuple:
    """Gives every device its share of a checkpoint's weights.

    Returns:
        `missing_keys` and `unexpected_keys`, as from `load_state_dict`.

    Raises:
        FileNotFoundError: There are none.
    """
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no model*.safetensors.")
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    return set_model_state_dict(model, weights, options=EVERYWHERE)


def optimizer_state(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict:
    """The whole state of an optimiser, as its own `state_dict()` on one device. All processes must ask; only the first
    gets it."""
    named = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if not named:  # not the first process
        return {}
    numbers = _numbers(named["param_groups"])
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {numbers[name]: state for name, state in named["state"].items()}, "param_groups": groups}


def load_optimizer_state(model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Gives every device its share of what `optimizer.state_dict()` is on one device."""
    ours = get_optimizer_state_dict(model, optimizer)["param_groups"]
    names = {number: name for name, number in _numbers(ours).items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    named = {"state": {names[number]: one for number, one in state["state"].items()}, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, named, options=EVERYWHERE)


def _numbers(groups: list[dict]) -> dict[str, int]:
    """Names of weights and their numbers in an optimiser, which counts through all groups."""
    return {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
