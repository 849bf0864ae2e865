"""Checkpoints of models sharded by FSDP2, in the same format as those of one device."""

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


FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL_ON_EACH_DEVICE = StateDictOptions(full_state_dict=True, strict=False)


@contextlib.contextmanager
def embeddings_in_root(model: PreTrainedModel) -> Iterator[None]:
    """Keep the embeddings in the root FSDP2 unit while Accelerate wraps the model.

    The embedding matrix is tied across four modules. Accelerate would put two of them into a unit of their own, which
    PyTorch refuses. Moreover, the loss reads the matrix without calling its module, so a separate unit would never be
    unsharded.
    """
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings


@contextlib.contextmanager
def gathered(model: PreTrainedModel, reshard_after_forward: bool) -> Iterator[None]:
    """Unshard all weights of a model for the duration of the context, so that each device can decode its own
    sentences. Models without FSDP2 units are left alone.

    Args:
        model (`PreTrainedModel`): Model to unshard.
        reshard_after_forward (`bool`): The model's own setting, restored on exit: True if its layers reshard their
            weights between forward and backward.
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
    """Restore the original class of a model wrapped by FSDP2 for the duration of the context.

    `save_pretrained` copies the source file of a model's class into the checkpoint. For the class that FSDP2 creates,
    that would be a file of PyTorch.
    """
    wrapped_class = type(model)
    if isinstance(model, FSDPModule):
        model.__class__ = wrapped_class.__bases__[1]  # the first base is FSDPModule
    try:
        yield
    finally:
        model.__class__ = wrapped_class


def are_finite(weights: list[nn.Parameter]) -> list[bool]:
    """For each weight, True if all its elements are finite on all devices. Collective: every process must call it."""
    shards = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    finite = torch.stack([shard.detach().isfinite().all() for shard in shards]).int()
    if any(isinstance(weight, DTensor) for weight in weights):
        torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
    return finite.bool().tolist()


def load_weights(model: PreTrainedModel, folder: str | Path) -> NamedTuple:
    """Load the weights of a checkpoint into a sharded model.

    Returns:
        `missing_keys` and `unexpected_keys`, as from `load_state_dict`.

    Raises:
        FileNotFoundError: The folder has no `model*.safetensors`.
    """
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no model*.safetensors.")
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    return set_model_state_dict(model, weights, options=FULL_ON_EACH_DEVICE)


def optimizer_state(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict:
    """Full state of a sharded optimiser, in the format of `state_dict()` on one device.

    Collective: every process must call it. The first process gets the state, the others an empty dictionary.
    """
    named = get_optimizer_state_dict(model, optimizer, options=FULL_ON_CPU)
    if not named:  # not the first process
        return {}
    numbers = _numbers(named["param_groups"])
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {numbers[name]: state for name, state in named["state"].items()}, "param_groups": groups}


def load_optimizer_state(model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load a full optimiser state, in the format of `state_dict()` on one device, into a sharded optimiser."""
    named_groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    names = {number: name for name, number in _numbers(named_groups).items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    named = {"state": {names[number]: entry for number, entry in state["state"].items()}, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, named, options=FULL_ON_EACH_DEVICE)


def _numbers(groups: list[dict]) -> dict[str, int]:
    """Number of each weight in the optimiser, by name. Weights are numbered across all groups."""
    return {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
