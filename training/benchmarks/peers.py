"""MarianMT models to compare with: of the same size, or with the same weights."""

from torch import nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..conversion import marian as marian_format


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


def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """Convert a model to a MarianMT model that computes the same function and searches with MarianMT's own defaults.

    Raises:
        ValueError: MarianMT cannot represent the model.
    """
    marian = marian_format.to_marian(model)
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = model.config.layer_norm_eps
    nearest = marian.generation_config
    marian.generation_config = GenerationConfig.from_model_config(marian.config)
    marian.generation_config.max_length = None
    # Padding is forbidden by settings there, not by a bias.
    marian.generation_config.bad_words_ids = nearest.bad_words_ids
    marian.generation_config.renormalize_logits = nearest.renormalize_logits
    return marian.to(model.dtype)
