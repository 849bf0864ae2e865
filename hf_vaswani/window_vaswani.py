"""Restricted self-attention (section 4, Table 1): each position attends to its neighbourhood only.

For very long sequences, the paper proposes "a neighborhood of size r in the input sequence centered around the
respective output position", and leaves it to future work. Its models see all positions, as do ours by default. With
`config.attention_window = r`, position `i` attends to position `j` if

- `|i - j| <= r // 2` in the encoder,
- `0 <= i - j <= r // 2` in the decoder.

So an odd `r` is the number of positions that an encoder's position sees; an even `r` means `r / 2` on either side.
Attention to the encoder's output is never restricted. A token reaches `r // 2` positions further in each layer.

The masks are transformers' own, in the form that eager, SDPA or flex attention takes. Flex attention skips hidden
blocks on a GPU. On a CPU, SDPA computes all `n²` scores, and then hides most of them. Long sequences are therefore
divided into blocks of queries there, each with its own keys: `O(r · n · d)`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import sliding_window_bidirectional_overlay


SMALLEST_BLOCK = 32  # queries; smaller matrix products are slow
WORTHWHILE = 4  # blocks are faster than a mask for sequences of this many times the keys of a block
MASKED_ATTENTIONS = ("eager", "sdpa", "flex_attention")


def block_size(reach: int) -> int:
    """Number of queries of a block: few, so that few of its keys are hidden; enough for fast matrix products."""
    return max(SMALLEST_BLOCK, reach)


def shortest_in_blocks(reach: int) -> int:
    """Length of the shortest sequence that is divided into blocks."""
    return WORTHWHILE * (block_size(reach) + 2 * reach)


def restricted(create_mask: Callable, reach: int | None) -> Callable:
    """Restrict a function that creates the mask of a stack's self-attention.

    Args:
        create_mask (`Callable`): `create_bidirectional_mask` or `create_causal_mask` of transformers.
        reach (`int`, *optional*): Greatest distance of a visible position; `None` for unrestricted attention.

    Returns:
        `create_mask` itself if `reach` is `None`. Otherwise a function of its first arguments. Masks by it hide all
        positions out of reach as well, except that a given mask of four dimensions stays as it is. Where attention in
        blocks is faster, they are the padding mask, boolean, `(batch or 1, length)`, for [`attention_in_blocks`].
    """
    return create_mask if reach is None else partial(_create_mask, create_mask, reach)


def _create_mask(create_mask: Callable, reach: int, config, hidden_states, attention_mask, past_key_values=None):
    batch, length, _ = hidden_states.shape
    if (
        config._attn_implementation == "sdpa"
        and hidden_states.device.type == "cpu"
        and past_key_values is None
        and (attention_mask is None or attention_mask.shape == (batch, length))
        and not torch.compiler.is_compiling()
        and length >= shortest_in_blocks(reach)
    ):
        return torch.ones(1, length, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    return create_mask(
        config,
        hidden_states,
        attention_mask,
        past_key_values=past_key_values,
        and_mask_function=sliding_window_bidirectional_overlay(reach),
    )


def attention_in_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Restricted self-attention of a sequence, divided into blocks of queries with the keys that they can reach.

    Args:
        module (`VaswaniAttention`): Self-attention of the encoder or, if `module.is_causal`, of the decoder.
        query, key (`torch.Tensor` of shape `(batch, h, length, d_k)`), value (`(batch, h, length, d_v)`): The heads.
        attention_mask (`torch.Tensor` of shape `(batch or 1, length)`): False on padding.
        scaling (`float`): `1 / √d_k`.
        dropout (`float`): Probability with which a weight is dropped.

    Returns:
        The outputs `(batch, length, h, d_v)`, and no weights.
    """
    before = module.config.decoder_reach if module.is_causal else module.config.encoder_reach
    after = 0 if module.is_causal else before
    batch, length, size = len(query), query.shape[2], block_size(before)
    extra = -length % size  # positions that complete the last block
    keys = before + size + after

    def with_margins(states: torch.Tensor) -> torch.Tensor:
        """`(batch, h, length, width)` as `(batch * blocks, h, keys, width)`."""
        blocks = F.pad(states, (0, 0, before, after + extra)).unfold(2, keys, size)
        return blocks.permute(0, 2, 1, 4, 3).flatten(0, 1)

    query = F.pad(query, (0, 0, 0, extra)).unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    distance = torch.arange(keys, device=query.device) - before - torch.arange(size, device=query.device)[:, None]
    is_near = (distance >= -before) & (distance <= after)  # (size, keys)
    is_real = F.pad(attention_mask, (before, after + extra)).unfold(1, keys, size)  # (batch or 1, blocks, keys)
    # Padding sees itself: a softmax over nothing would have no gradient.
    mask = (is_near & is_real[:, :, None] | (distance == 0)).expand(batch, -1, -1, -1)
    outputs = F.scaled_dot_product_attention(
        query, with_margins(key), with_margins(value), mask.flatten(0, 1)[:, None], dropout_p=dropout, scale=scaling
    )  # (batch * blocks, h, size, d_v)
    return outputs.transpose(1, 2).unflatten(0, (batch, -1)).flatten(1, 2)[:, :length], None


__all__ = ["MASKED_ATTENTIONS", "attention_in_blocks", "restricted", "shortest_in_blocks"]
