"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), bottom up:
positions, attention, feed-forward, layers, stacks, the model, its tied output projection and loss.

Shapes in comments: `batch` sentences, `source` and `target` positions, `h` heads.
"""

from .versions_vaswani import OLDEST  # isort: skip  # noqa: F401 (first, for its check)

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .checksums_vaswani import VaswaniChecksumsMixin
from .configuration_vaswani import VaswaniConfig
from .generation_vaswani import VaswaniGenerationMixin
from .kernels_vaswani import (
    dropout,
    fastest_attention,
    is_plain_product,
    linear,
    linear_layers,
    projected_cross_entropy,
    quantize_linear_layers,
)
from .window_vaswani import MASKED_ATTENTIONS, attention_in_blocks, restricted


IGNORED_LABEL = -100  # label of a position without a target, PyTorch's default


def sinusoids(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    """Position encodings (section 3.5): sines at the even features, cosines of the same angles at the odd ones.

    Args:
        positions (`torch.Tensor` of shape `(...)`): Positions, counted from 0, without an upper limit.
        d_model (`int`): Width of the model, even.

    Returns:
        `torch.Tensor` of shape `(..., d_model)`, float32.
    """
    pairs = torch.arange(d_model // 2, device=positions.device, dtype=torch.float32)
    frequencies = torch.exp(pairs * (-2 * math.log(10000.0) / d_model))
    angles = positions[..., None].float() * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def positions_of(attention_mask: torch.Tensor | None, past_length, length: int, device) -> torch.Tensor:
    """Position of every token in its sentence, not counting padding on either side.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): 1 on real tokens.
        past_length (`int` or 0-d `torch.Tensor`): Number of tokens in the cache.
        length (`int`): Number of tokens after those.
        device (`torch.device`): Device of the result, if there is no mask.

    Returns:
        `torch.Tensor` of shape `(batch, length)`, or `(1, length)` without a mask.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past_length)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


class VaswaniPositionEmbedding(nn.Module):
    """Sum of embeddings and position encodings: sinusoids, or a learned table (Table 3, row E)."""

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.d_model = config.d_model
        self.learned = config.position_embedding == "learned"
        if self.learned:
            self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.d_model))

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`embeddings` `(batch, length, d_model)`, `positions` `(batch or 1, length)`; returns the sum."""
        if not self.learned:
            return embeddings + sinusoids(positions, self.d_model).to(embeddings.dtype)
        if not torch.compiler.is_compiling() and (last := int(positions.max())) >= len(self.weight):
            raise ValueError(
                f"A sequence of {last + 1} tokens does not fit the learned position table: "
                f"max_position_embeddings is {len(self.weight)}."
            )
        return embeddings + F.embedding(positions, self.weight)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention (section 3.2.1): `softmax(QKᵀ / √d_k) V`.

    Args:
        query (`torch.Tensor` of shape `(batch, h, queries, d_k)`), key (`(batch, h, keys, d_k)`),
        value (`(batch, h, keys, d_v)`): The projected heads.
        attention_mask (`torch.Tensor` of shape `(batch, 1, queries, keys)`, *optional*): Added to the scores; the
            smallest number of the type hides a key.
        scaling (`float`): `1 / √d_k`.
        dropout (`float`): Probability with which a weight is dropped in training.

    Returns:
        The outputs `(batch, queries, h, d_v)` and the weights `(batch, h, queries, keys)`.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class VaswaniAttention(nn.Module):
    """Multi-head attention (section 3.2.2). `d_k` and `d_v` need not be `d_model / h` (Table 3, row B).

    Encoder-decoder attention if `forward` gets `key_value_states`, self-attention otherwise.
    """

    def __init__(self, config: VaswaniConfig, layer_idx: int, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.d_k, self.d_v = config.d_k, config.d_v
        self.scaling = config.d_k**-0.5
        self.dropout = config.attention_dropout

        h, bias = config.num_heads, config.attention_bias
        self.q_proj = nn.Linear(config.d_model, h * config.d_k, bias=bias)
        self.k_proj = nn.Linear(config.d_model, h * config.d_k, bias=bias)
        self.v_proj = nn.Linear(config.d_model, h * config.d_v, bias=bias)
        self.o_proj = nn.Linear(h * config.d_v, config.d_model, bias=bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch, queries, d_model)`): States that produce the queries.
            attention_mask (`torch.Tensor`, *optional*): Mask in the form that the attention implementation takes.
            key_value_states (`torch.Tensor` of shape `(batch, keys, d_model)`, *optional*): The encoder's output.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier positions.

        Returns:
            The outputs `(batch, queries, d_model)`, and the weights `(batch, h, queries, keys)` if the attention
            implementation is `eager`.
        """
        if key_value_states is None and past_key_values is None:
            projected = linear_layers(hidden_states, self.q_proj, self.k_proj, self.v_proj)
            widths = self.d_k, self.d_k, self.d_v
            query, key, value = map(self._split_heads, projected, widths)
        else:
            query = self._split_heads(linear(hidden_states, self.q_proj), self.d_k)
            key, value = self._keys_and_values(hidden_states, key_value_states, past_key_values)
        kwargs |= {"dropout": self.dropout if self.training else 0.0, "scaling": self.scaling}
        outputs, weights = self._attend(query, key, value, attention_mask, **kwargs)
        return linear(outputs.flatten(2), self.o_proj), weights  # concatenate the heads, then W^O

    def _attend(self, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        name = self.config._attn_implementation
        if is_flash_attention_requested(self.config) and attention_mask is not None and attention_mask.dim() == 4:
            name = "sdpa"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        if name == "sdpa":
            is_in_blocks = attention_mask is not None and attention_mask.dim() == 2
            attention = attention_in_blocks if is_in_blocks else attention
            attention = fastest_attention(attention, query, key, kwargs["dropout"])
        return attention(self, query, key, value, attention_mask, **kwargs)

    @staticmethod
    def _split_heads(states: torch.Tensor, width: int) -> torch.Tensor:
        return states.unflatten(-1, (-1, width)).transpose(1, 2)  # (batch, h, length, width)

    def _keys_and_values(self, hidden_states, key_value_states, cache) -> tuple[torch.Tensor, torch.Tensor]:
        is_cross_attention = key_value_states is not None
        if is_cross_attention and cache is not None and cache.is_updated.get(self.layer_idx):
            # Keys and values of the encoder's output stay the same while a sentence is decoded.
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values

        states = key_value_states if is_cross_attention else hidden_states
        key, value = linear_layers(states, self.k_proj, self.v_proj)
        key, value = self._split_heads(key, self.d_k), self._split_heads(value, self.d_v)
        if cache is None:
            return key, value
        if is_cross_attention:
            cache.is_updated[self.layer_idx] = True
            return cache.cross_attention_cache.update(key, value, self.layer_idx)
        return cache.self_attention_cache.update(key, value, self.layer_idx)


class VaswaniFeedForward(nn.Module):
    """Position-wise feed-forward network (section 3.3): `max(0, xW_1 + b_1)W_2 + b_2`."""

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = config.activation_dropout

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` and the result: `(batch, length, d_model)`."""
        inner = self.activation(linear(hidden_states, self.fc1))  # (batch, length, d_ff)
        return linear(dropout(inner, self.dropout, self.training), self.fc2)


class VaswaniResidual(nn.Module):
    """Residual connection with dropout and layer norm: `LayerNorm(x + Dropout(Sublayer(x)))` (sections 3.1, 5.4)."""

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = config.dropout

    def forward(self, hidden_states: torch.Tensor, sublayer_output: torch.Tensor) -> torch.Tensor:
        """Both arguments and the result: `(batch, length, d_model)`."""
        return self.norm(hidden_states + dropout(sublayer_output, self.dropout, self.training))


class VaswaniEncoderLayer(GradientCheckpointingLayer):
    """One layer of the encoder (section 3.1): self-attention, then the feed-forward network."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__()
        self.self_attn = VaswaniAttention(config, layer_idx)
        self.self_attn_residual = VaswaniResidual(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_residual = VaswaniResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`hidden_states` and the result: `(batch, source, d_model)`."""
        attended, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        hidden_states = self.self_attn_residual(hidden_states, attended)
        return self.feed_forward_residual(hidden_states, self.feed_forward(hidden_states))


class VaswaniDecoderLayer(GradientCheckpointingLayer):
    """One layer of the decoder (section 3.1): masked self-attention, attention to the encoder, feed-forward."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__()
        self.self_attn = VaswaniAttention(config, layer_idx, is_causal=True)
        self.self_attn_residual = VaswaniResidual(config)
        self.encoder_attn = VaswaniAttention(config, layer_idx)
        self.encoder_attn_residual = VaswaniResidual(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_residual = VaswaniResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`hidden_states` and the result: `(batch, target, d_model)`; `encoder_hidden_states`:
        `(batch, source, d_model)`."""
        attended, _ = self.self_attn(hidden_states, attention_mask, past_key_values=past_key_values, **kwargs)
        hidden_states = self.self_attn_residual(hidden_states, attended)
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                hidden_states, encoder_attention_mask, encoder_hidden_states, past_key_values, **kwargs
            )
            hidden_states = self.encoder_attn_residual(hidden_states, attended)
        return self.feed_forward_residual(hidden_states, self.feed_forward(hidden_states))


class VaswaniPreTrainedModel(VaswaniChecksumsMixin, PreTrainedModel):
    """Loading, saving and initialisation, shared by all classes of the model.

    Initial values (the paper is silent; these are the released code's):

    | weights | distribution |
    |---|---|
    | projections, feed-forward | Glorot uniform, bias 0 |
    | embedding, learned positions | normal, standard deviation `d_model ** -0.5` |
    | layer normalisation | scale 1, bias 0 |
    """

    config: VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        """Choose the attention implementation.

        Raises:
            ValueError: Flash attention is requested, but `d_k` and `d_v` differ; its kernels have one width for both.
                Or `attention_window` is given, and the implementation takes no mask.
        """
        d_k, d_v, window = self.config.d_k, self.config.d_v, self.config.attention_window
        if window is not None and attn_implementation not in (None, *MASKED_ATTENTIONS):
            raise ValueError(
                f"{attn_implementation!r} cannot restrict attention, but attention_window is {window}: choose one of "
                f"{', '.join(MASKED_ATTENTIONS)}."
            )
        if is_flash_attention_requested(requested_attention_implementation=attn_implementation) and d_k != d_v:
            raise ValueError(
                f"{attn_implementation!r} needs keys and values of one width, but d_k is {d_k} and d_v is {d_v}: "
                'choose attn_implementation="sdpa".'
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def to_int8(self) -> "VaswaniPreTrainedModel":
        """Quantise every linear layer to 8 bits, in place, for faster inference on a CPU.

        The rest of the model becomes float32. The model can then be neither trained nor saved.
        """
        self.float().eval().requires_grad_(False)
        quantize_linear_layers(self)
        self.config.tie_word_embeddings = False  # the projection is 8-bit, the embedding is not
        self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=True)
        return self

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding) or (isinstance(module, VaswaniPositionEmbedding) and module.learned):
            std = self.config.embedding_init_std
            init.normal_(module.weight, std=self.config.d_model**-0.5 if std is None else std)


class VaswaniStack(VaswaniPreTrainedModel):
    """Base of encoder and decoder, which embeds their inputs (sections 3.4, 3.5, 5.4)."""

    def __init__(self, config: VaswaniConfig, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_positions = VaswaniPositionEmbedding(config)
        self.embed_scale = math.sqrt(config.d_model)
        self.gradient_checkpointing = False

    def init_parallel_plans(self) -> None:
        """Clear the plan of the stack; the one in the configuration covers the whole model."""
        super().init_parallel_plans()
        self._tp_plan = {}

    def embed(self, input_ids, inputs_embeds, attention_mask, past_length=0) -> torch.Tensor:
        """`Dropout(√d_model · embedding + position)`, `(batch, length, d_model)`.

        Raises:
            ValueError: Both or neither of `input_ids` and `inputs_embeds` are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{type(self).__name__} takes exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        positions = positions_of(attention_mask, past_length, inputs_embeds.shape[1], inputs_embeds.device)
        hidden_states = self.embed_positions(inputs_embeds * self.embed_scale, positions)
        return dropout(hidden_states, self.config.dropout, self.training)


class VaswaniEncoder(VaswaniStack):
    """The encoder: `encoder_layers` layers over the embedded source (section 3.1)."""

    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}

    def __init__(self, config: VaswaniConfig):
        super().__init__(config, config.source_vocab_size or config.vocab_size)
        self.layers = nn.ModuleList(VaswaniEncoderLayer(config, i) for i in range(config.encoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 0 on padding.
            inputs_embeds (`torch.Tensor` of shape `(batch, source, d_model)`): Embeddings, instead of `input_ids`.

        Returns:
            `last_hidden_state` of shape `(batch, source, d_model)`, and the other requested outputs.
        """
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask)
        create_mask = restricted(create_bidirectional_mask, self.config.encoder_reach)
        mask = create_mask(self.config, hidden_states, attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VaswaniDecoder(VaswaniStack):
    """The decoder: `decoder_layers` layers over the embedded target and the encoder's output (section 3.1)."""

    _can_record_outputs = {
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VaswaniConfig):
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList(VaswaniDecoderLayer(config, i) for i in range(config.decoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, target)`): Target tokens that are not in the cache.
            attention_mask (`torch.Tensor` of shape `(batch, past + target)`, *optional*): 0 on padding.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, source, d_model)`): The encoder's output.
            encoder_attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 0 on padding.
            past_key_values (`Cache`, *optional*): Keys and values of earlier calls.
            inputs_embeds (`torch.Tensor` of shape `(batch, target, d_model)`): Embeddings, instead of `input_ids`.
            use_cache (`bool`, *optional*): Return a cache.

        Returns:
            `last_hidden_state` of shape `(batch, target, d_model)`, the cache, and the other requested outputs.
        """
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        elif past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            # A single cache would mix the target's keys with the source's.
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, past_length)

        create_mask = restricted(create_causal_mask, self.config.decoder_reach)
        causal_mask = create_mask(
            self.config,
            hidden_states,
            attention_mask,
            past_key_values=past_key_values.self_attention_cache if past_key_values is not None else None,
        )
        if encoder_hidden_states is not None:
            is_padded = encoder_attention_mask is not None and encoder_attention_mask.dim() == 2
            if is_padded and is_flash_attention_requested(self.config):
                # transformers' flash attention would apply the source's padding to the target too. With a mask of four
                # dimensions, `_attend` chooses SDPA.
                encoder_attention_mask = encoder_attention_mask[:, None, None].bool()
            encoder_attention_mask = create_bidirectional_mask(
                self.config, hidden_states, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states
            )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder and decoder over one shared embedding (Figure 1), without the output projection."""

    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        if config.source_vocab_size is not None:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "shared.weight"}
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = VaswaniEncoder(config)
        self.decoder = VaswaniDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """Tie the embeddings also where `tie_word_embeddings` is off, which is about the output projection."""
        return super().get_expanded_tied_weights_keys(all_submodels) or self._tied_weights_keys.copy()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of `vocab_size` tokens; one of the source's own is `encoder.embed_tokens`."""
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.shared = self.decoder.embed_tokens = value
        if self.config.source_vocab_size is None:
            self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 0 on padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target)`): The target, shifted right.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, past + target)`, *optional*): 0 on padding.
            encoder_outputs (`BaseModelOutput` or `tuple`, *optional*): The encoder's output, if already computed.
            past_key_values (`Cache`, *optional*): The decoder's cache.
            inputs_embeds, decoder_inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*):
                Embeddings, instead of token ids.
            use_cache (`bool`, *optional*): Return a cache.

        Returns:
            The decoder's `last_hidden_state` `(batch, target, d_model)`, `encoder_last_hidden_state`
            `(batch, source, d_model)`, the cache, and the other requested outputs.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VaswaniForConditionalGeneration(VaswaniPreTrainedModel, VaswaniGenerationMixin, GenerationMixin):
    """The whole Transformer: [`VaswaniModel`] and the projection to the vocabulary, tied to the embedding
    (section 3.4)."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """
        Args:
            labels (`torch.LongTensor` of shape `(batch, target)`, *optional*): Target tokens, -100 at positions
                without one. Without `decoder_input_ids`, the decoder reads the labels shifted right.
            logits_to_keep (`int` or 1-D `torch.Tensor`, *optional*): Compute the logits of this many last positions,
                or of these positions; 0 means all.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): Divisor of the loss: the number of labels in the
                whole batch, on all devices and in all accumulated parts. By default, those in `labels`.
            skip_logits (`bool`, defaults to `False`): Compute the loss and return no logits. This is faster, and
                saves the memory of a `(batch, target, vocab_size)` tensor.

        The other arguments are those of [`VaswaniModel`].

        Returns:
            `loss` (label-smoothed in training mode, plain cross-entropy otherwise), `logits` of shape
            `(batch, target, vocab_size)`, and the outputs of [`VaswaniModel`].

        Raises:
            ValueError: `skip_logits` without `labels`.
        """
        if skip_logits and labels is None:
            raise ValueError("skip_logits needs labels: without them the logits are all there is to return.")
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        skip_logits = skip_logits and is_plain_product(self.lm_head)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = None if skip_logits else self.lm_head(hidden_states[:, kept])
        loss = None
        if labels is not None:
            loss = self._loss(hidden_states, logits, labels.to(hidden_states.device), num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _loss(self, hidden_states, logits, labels, num_items_in_batch) -> torch.Tensor:
        """Cross-entropy per label, smoothed in training mode (section 5.4)."""
        epsilon = self.config.label_smoothing if self.training else 0.0
        if logits is None:
            total = projected_cross_entropy(hidden_states, self.lm_head, labels, epsilon, IGNORED_LABEL)
        else:
            total = F.cross_entropy(
                logits.flatten(0, 1).float(),
                labels.flatten(),
                ignore_index=IGNORED_LABEL,
                label_smoothing=epsilon,
                reduction="sum",
            )
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED_LABEL).sum().clamp(min=1)
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift `labels` `(batch, target)` right, put the start token first, and replace -100 by padding."""
        start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)


__all__ = ["VaswaniForConditionalGeneration", "VaswaniModel", "VaswaniPreTrainedModel"]
