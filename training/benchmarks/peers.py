"""Conversion of a model to MarianMT."""

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..conversion.positions import position_table


MARIAN_NAMES = {
    "self_attn_residual.norm": "self_attn_layer_norm",
    "encoder_attn_residual.norm": "encoder_attn_layer_norm",
    "feed_forward_residual.norm": "final_layer_norm",
    "feed_forward.": "",
    "o_proj": "out_proj",
}


def marian_like(config: VaswaniConfig, max_positions: int = 512) -> MarianMTModel:
    """Create a MarianMT model of the same size.

    It has `max_positions` positions, and `d_k = d_v = d_model / num_heads`.
    """
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function=config.activation_function,
            scale_embedding=True,
            dropout=config.dropout,
            max_position_embeddings=max_positions,
            pad_token_id=config.pad_token_id,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            forced_eos_token_id=None,
            decoder_start_token_id=config.decoder_start_token_id,
        )
    )


@torch.no_grad()
def to_marian(model: VaswaniForConditionalGeneration, max_positions: int = 512) -> MarianMTModel:
    """Convert a model to a MarianMT model that computes the same function.

    Marian's position embeddings have all sines before all cosines. All axes of width `d_model` are permuted alike.

    Args:
        model (`VaswaniForConditionalGeneration`): Model with tied embeddings and `d_k = d_v = d_model / num_heads`.
        max_positions (`int`): Length of Marian's position table.

    Raises:
        ValueError: The weights do not fit MarianMT.
    """
    config = model.config
    marian = marian_like(config, max_positions)
    sines_first = torch.cat([torch.arange(0, config.d_model, 2), torch.arange(1, config.d_model, 2)])
    weights = {}
    for name, weight in model.model.state_dict().items():
        writes_features = name.endswith(
            ("norm.weight", "norm.bias", "o_proj.weight", "o_proj.bias", "fc2.weight", "fc2.bias")
        )
        if writes_features:
            weight = weight[sines_first]
        elif weight.dim() == 2:  # reads features
            weight = weight[:, sines_first]
        for our_name, marian_name in MARIAN_NAMES.items():
            name = name.replace(our_name, marian_name)
        weights[name] = weight
    for stack in ("encoder", "decoder"):
        positions = position_table(model.model.get_submodule(stack), max_positions)
        weights[f"{stack}.embed_positions.weight"] = positions[:, sines_first]
    if not config.attention_bias:
        for name, weight in marian.model.state_dict().items():
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "out_proj.bias")):
                weights[name] = torch.zeros_like(weight)
    missing, unexpected = marian.model.load_state_dict(weights, strict=False)
    if unexpected or missing:
        raise ValueError(
            f"The weights do not fit MarianMT: unexpected {', '.join(unexpected) or 'none'}, "
            f"missing {', '.join(missing) or 'none'}."
        )
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = config.layer_norm_eps
    marian.generation_config.update(bad_words_ids=None, max_length=None)
    return marian.to(model.dtype).eval()
