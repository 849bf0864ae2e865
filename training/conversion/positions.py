"""Positions of a model as a table, for toolkits that store one."""

import torch
from torch import nn

from hf_vaswani import VaswaniConfig


SINUSOIDS = 4096  # rows of the table of a model without learned positions


def position_count(config: VaswaniConfig) -> int:
    """Rows of the position table: the maximum number of tokens of a text."""
    return config.max_position_embeddings if config.position_embedding == "learned" else SINUSOIDS


@torch.no_grad()
def position_table(stack: nn.Module, length: int) -> torch.Tensor:
    """Position embeddings of an encoder or decoder, `(length, d_model)`, in float32."""
    device = next(stack.parameters()).device
    zeros = torch.zeros(1, length, stack.config.d_model, device=device)
    return stack.embed_positions(zeros, torch.arange(length, device=device)[None])[0].float().cpu()
