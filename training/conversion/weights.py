"""Names and order of weights: ours, and those that MarianMT, FSMT and fairseq have in common."""

from collections.abc import Mapping

import torch
from torch import nn


# Parts of names: theirs, ours.
NAMES = (
    ("encoder_attn_layer_norm", "encoder_attn_residual.norm"),
    ("self_attn_layer_norm", "self_attn_residual.norm"),
    ("final_layer_norm", "feed_forward_residual.norm"),
    (".fc1.", ".feed_forward.fc1."),
    (".fc2.", ".feed_forward.fc2."),
    (".out_proj.", ".o_proj."),
)
# Weights whose rows, and biases whose elements, are the `d_model` features.
WRITES_FEATURES = ("norm.weight", "norm.bias", "o_proj.weight", "o_proj.bias", "fc2.weight", "fc2.bias")
ATTENTION_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")


def our_name(name: str) -> str:
    """Name of a layer's weight here, by its name in the other toolkits."""
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def their_name(name: str) -> str:
    """Inverse of `our_name`."""
    for theirs, ours in NAMES:
        name = name.replace(ours, theirs)
    return name


def interleaved(d_model: int) -> torch.Tensor:
    """Order `(d_model,)` that takes features with all sines before all cosines to alternating sines and cosines."""
    return torch.arange(d_model).unflatten(0, (2, -1)).t().flatten()


def halved(d_model: int) -> torch.Tensor:
    """Inverse of `interleaved`."""
    return torch.arange(d_model).unflatten(0, (-1, 2)).t().flatten()


def reordered(weights: Mapping[str, torch.Tensor], order: torch.Tensor) -> dict[str, torch.Tensor]:
    """Reorder the `d_model` features of all weights, which have our names. The function of the model stays the same.

    Args:
        weights (`Mapping`): Embeddings, layers and output projection of a model, without positions.
        order (`torch.Tensor` of shape `(d_model,)`): Old index of each new feature.
    """
    return {
        name: weight[order] if name.endswith(WRITES_FEATURES) else weight[:, order] if weight.dim() == 2 else weight
        for name, weight in weights.items()
    }


@torch.no_grad()
def load_exactly(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights into a model, all of them and no other.

    Args:
        model (`nn.Module`): Model whose parameters and buffers to set; tied ones have their first name.
        weights (`Mapping`): New values by name.

    Raises:
        ValueError: A weight is missing, unexpected, or of the wrong shape. The message names it.
    """
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for found, problem in (
        (places.keys() - weights.keys(), "missing"),
        (weights.keys() - places.keys(), "unexpected"),
    ):
        if found:
            raise ValueError(f"weights {problem}: {', '.join(sorted(found)[:3])}{' ...' if len(found) > 3 else ''}.")
    for name, weight in weights.items():
        if weight.shape != places[name].shape:
            raise ValueError(f"{name}: expected shape {list(places[name].shape)}, found {list(weight.shape)}.")
        places[name].copy_(weight)
