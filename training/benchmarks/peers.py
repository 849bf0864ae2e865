"""Conversion of a model to MarianMT and CTranslate2."""

from pathlib import Path

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration


MARIAN_NAMES = {
    "self_attn_residual.norm": "self_attn_layer_norm",
    "encoder_attn_residual.norm": "encoder_attn_layer_norm",
    "feed_forward_residual.norm": "final_layer_norm",
    "feed_forward.": "",
    "o_proj": "out_proj",
}


def position_table(stack: nn.Module, length: int) -> torch.Tensor:
    """Position embeddings of an encoder or decoder, `(length, d_model)`."""
    zeros = torch.zeros(1, length, stack.config.d_model)
    return stack.embed_positions(zeros, torch.arange(length)[None])[0].float()


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


def _linear(module: nn.Linear):
    from ctranslate2.specs import common_spec

    result = common_spec.LinearSpec()
    result.weight = module.weight.float().numpy()
    if module.bias is not None:
        result.bias = module.bias.float().numpy()
    return result


def _copy_linear(target, *modules: nn.Linear) -> None:
    """Copy linear layers to one whose outputs are concatenated."""
    from ctranslate2.converters.utils import fuse_linear

    fuse_linear(target, [_linear(module) for module in modules])


def _copy_norm(target, residual: nn.Module) -> None:
    target.gamma, target.beta = residual.norm.weight.float().numpy(), residual.norm.bias.float().numpy()


def _copy_attention(target, attention: nn.Module, is_self: bool) -> None:
    if is_self:
        _copy_linear(target.linear[0], attention.q_proj, attention.k_proj, attention.v_proj)
    else:
        _copy_linear(target.linear[0], attention.q_proj)
        _copy_linear(target.linear[1], attention.k_proj, attention.v_proj)
    _copy_linear(target.linear[-1], attention.o_proj)


@torch.no_grad()
def to_ctranslate2(
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    quantization: str,
    max_positions: int = 512,
) -> None:
    """Convert a model to the format of CTranslate2.

    Args:
        model (`VaswaniForConditionalGeneration`): Model with `d_k = d_v = d_model / num_heads`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer whose tokens become the vocabulary.
        folder (`str`): Folder to write.
        quantization (`str`): Type of the weights: float32, bfloat16, int8, ...
        max_positions (`int`): Length of the position table.
    """
    from ctranslate2.specs import TransformerSpec, common_spec

    config = model.config
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=False,
        activation=common_spec.Activation[config.activation_function.upper()],
    )

    embedding = model.model.shared.weight.float().numpy()
    for target, stack in ((spec.encoder, model.model.encoder), (spec.decoder, model.model.decoder)):
        target.scale_embeddings = stack.embed_scale
        target.position_encodings.encodings = position_table(stack, max_positions).numpy()
        for layer_spec, layer in zip(target.layer, stack.layers):
            _copy_attention(layer_spec.self_attention, layer.self_attn, is_self=True)
            _copy_norm(layer_spec.self_attention.layer_norm, layer.self_attn_residual)
            _copy_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
            _copy_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)
            _copy_norm(layer_spec.ffn.layer_norm, layer.feed_forward_residual)
            if stack is model.model.decoder:
                _copy_attention(layer_spec.attention, layer.encoder_attn, is_self=False)
                _copy_norm(layer_spec.attention.layer_norm, layer.encoder_attn_residual)
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = embedding
    spec.decoder.projection.weight = embedding

    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = tokenizer.bos_token
    spec.config.eos_token = tokenizer.eos_token
    spec.config.unk_token = tokenizer.pad_token  # CTranslate2 requires an unknown token; this vocabulary has none
    spec.config.decoder_start_token = tokenizer.convert_ids_to_tokens(config.decoder_start_token_id)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    Path(folder).mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
