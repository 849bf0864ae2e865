"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al. 2017), in the paper's terms."""

from .versions_vaswani import OLDEST  # isort: skip  # noqa: F401 (first, for its check)

import math
from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .pipeline_vaswani import VaswaniTranslationPipeline


# Table 3 of the paper, one entry for each row; fields that an entry leaves out are the base model's.
TABLE_3: dict[str, dict] = {
    "base": {},
    # (A) heads, at constant computation
    "A-h1": {"num_heads": 1, "d_k": 512, "d_v": 512},
    "A-h4": {"num_heads": 4, "d_k": 128, "d_v": 128},
    "A-h16": {"num_heads": 16, "d_k": 32, "d_v": 32},
    "A-h32": {"num_heads": 32, "d_k": 16, "d_v": 16},
    # (B) attention key size
    "B-dk16": {"d_k": 16, "d_v": 64},
    "B-dk32": {"d_k": 32, "d_v": 64},
    # (C) model size
    "C-N2": {"encoder_layers": 2, "decoder_layers": 2},
    "C-N4": {"encoder_layers": 4, "decoder_layers": 4},
    "C-N8": {"encoder_layers": 8, "decoder_layers": 8},
    "C-d256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "C-d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "C-ff1024": {"d_ff": 1024},
    "C-ff4096": {"d_ff": 4096},
    # (D) regularisation
    "D-drop0.0": {"dropout": 0.0},
    "D-drop0.2": {"dropout": 0.2},
    "D-ls0.0": {"label_smoothing": 0.0},
    "D-ls0.2": {"label_smoothing": 0.2},
    # (E) learned positions instead of sinusoids
    "E-learned": {"position_embedding": "learned"},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
}

POSITION_EMBEDDINGS = ("sinusoidal", "learned")
WINDOW_SIDES = ("both", "encoder", "decoder")

# Classes in the code of a checkpoint, which the Auto classes and `pipeline()` look up here.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
}
CUSTOM_PIPELINES = {
    "translation": {
        "impl": f"pipeline_vaswani.{VaswaniTranslationPipeline.__name__}",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}

# Tensor parallelism as in Megatron: the attention heads and the inner features of the feed-forward network are split
# across devices, whose outputs are summed. The embedding is split by vocabulary.
TENSOR_PARALLEL_PLAN = {
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "decoder.embed_tokens": "embedding_rowwise",
    **{
        f"{stack}.layers.*.{attention}.{projection}": style
        for stack, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn"))
        for projection, style in (
            ("q_proj", "colwise"),
            ("k_proj", "colwise"),
            ("v_proj", "colwise"),
            ("o_proj", "rowwise"),
        )
    },
    "encoder.layers.*.feed_forward.fc1": "colwise",
    "encoder.layers.*.feed_forward.fc2": "rowwise",
    "decoder.layers.*.feed_forward.fc1": "colwise",
    "decoder.layers.*.feed_forward.fc2": "rowwise",
}


@strict
class VaswaniConfig(PreTrainedConfig):
    r"""
    Configuration of a [`VaswaniModel`]. The defaults are the paper's base model (Table 3).

    Args:
        vocab_size (`int`, defaults to 37000): Entries of the vocabulary that both languages share (section 5.1).
        source_vocab_size (`int`, *optional*): Entries of a vocabulary of the source's own, with an embedding of its
            own; `vocab_size` is then the target's. Models of other toolkits need it; the paper shares one.
        d_model (`int`, defaults to 512): Width of the embeddings and of every layer's output.
        d_ff (`int`, defaults to 2048): Inner width of the feed-forward network (section 3.3).
        num_heads (`int`, defaults to 8): Attention heads `h` (section 3.2.2).
        d_k (`int`, *optional*): Width of each head's queries and keys; `d_model / num_heads` when not given.
        d_v (`int`, *optional*): Width of each head's values; `d_model / num_heads` when not given.
        encoder_layers (`int`, defaults to 6): Layers `N` of the encoder.
        decoder_layers (`int`, defaults to 6): Layers `N` of the decoder, at least 1.
        dropout (`float`, defaults to 0.1): `P_drop`, on each sub-layer's output and on the embedded inputs
            (section 5.4).
        attention_dropout (`float`, defaults to 0.0): Dropout on the attention weights; the paper has none.
        activation_dropout (`float`, defaults to 0.0): Dropout inside the feed-forward network; the paper has none.
        activation_function (`str`, defaults to `"relu"`): Non-linearity of the feed-forward network.
        attention_bias (`bool`, defaults to `False`): Biases in the four attention projections.
        attention_window (`int`, *optional*): Size `r` of the neighbourhood that self-attention is restricted to
            (section 4): a position sees those at a distance of at most `r // 2`. The paper's models see all positions.
        attention_window_side (`str`, defaults to `"both"`): Stack that `attention_window` restricts: `"encoder"`,
            `"decoder"` or `"both"`.
        output_bias (`bool`, defaults to `False`): Bias in the output projection; the paper has none, Marian does.
        label_smoothing (`float`, defaults to 0.1): `ε_ls` (section 5.4). Active in training mode only, like dropout.
        position_embedding (`str`, defaults to `"sinusoidal"`): `"sinusoidal"` (section 3.5) or `"learned"`
            (Table 3, row E).
        max_position_embeddings (`int`, defaults to 1024): Rows of a learned position table. Sinusoids have no limit;
            for them, the value only informs other tools of the maximum intended length.
        layer_norm_eps (`float`, defaults to 1e-6): ε of the layer normalisations.
        embedding_init_std (`float`, *optional*): Standard deviation of the initial embeddings;
            `d_model ** -0.5` when not given.
        pad_token_id (`int`, defaults to 0), bos_token_id (`int`, defaults to 1), eos_token_id (`int`, defaults to 2):
            Special tokens of the shared vocabulary.
        decoder_start_token_id (`int`, defaults to 1): Token that the decoder reads first.
        use_cache (`bool`, defaults to `True`): Cache keys and values of past positions during generation.
        tie_word_embeddings (`bool`, defaults to `True`): Share one matrix between both embeddings and the output
            projection (section 3.4). If `False`, the output projection has its own; the embeddings still share theirs,
            unless `source_vocab_size` is given.

    Raises:
        StrictDataclassFieldValidationError: A field has the wrong type.
        StrictDataclassClassValidationError: A field is out of range, or the widths are inconsistent.
        TypeError: An unknown field resembles a known one.

    Example:

    ```python
    >>> from hf_vaswani import VaswaniConfig

    >>> VaswaniConfig().d_k
    64
    >>> VaswaniConfig.from_table3("big", vocab_size=32000).num_heads
    16
    ```"""

    model_type = "vaswani"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "encoder_ffn_dim": "d_ff",
        "decoder_ffn_dim": "d_ff",
        "num_attention_heads": "num_heads",
        "encoder_attention_heads": "num_heads",
        "decoder_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
    }
    base_model_tp_plan = TENSOR_PARALLEL_PLAN
    # True if the installed package has registered the pipelines: `pipeline()` then loads no code from a checkpoint.
    pipelines_are_registered: ClassVar[bool] = False

    vocab_size: int = 37000
    source_vocab_size: int | None = None
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    attention_bias: bool = False
    attention_window: int | None = None
    attention_window_side: str = "both"
    output_bias: bool = False
    label_smoothing: float | int = 0.1
    position_embedding: str = "sinusoidal"
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-6
    embedding_init_std: float | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1
    is_encoder_decoder: bool = True
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        self._reject_misspelled(kwargs)
        if self.d_k is None:
            self.d_k = self._default_head_width("d_k")
        if self.d_v is None:
            self.d_v = self._default_head_width("d_v")
        kwargs["auto_map"] = {**(kwargs.get("auto_map") or {}), **AUTO_MAP}
        pipelines = {**(kwargs.pop("custom_pipelines", None) or {}), **deepcopy(CUSTOM_PIPELINES)}
        if self.pipelines_are_registered:
            pipelines = {task: pipeline for task, pipeline in pipelines.items() if task not in CUSTOM_PIPELINES}
        kwargs["custom_pipelines"] = pipelines
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict:
        fields = super().to_dict()
        return {**fields, "custom_pipelines": {**(fields.get("custom_pipelines") or {}), **CUSTOM_PIPELINES}}

    @property
    def encoder_reach(self) -> int | None:
        """Greatest distance of a position that self-attention of the encoder sees; `None` if it sees all."""
        return self._reach("encoder")

    @property
    def decoder_reach(self) -> int | None:
        """Greatest distance of a position that self-attention of the decoder sees; `None` if it sees all."""
        return self._reach("decoder")

    def _reach(self, side: str) -> int | None:
        if self.attention_window is None or self.attention_window_side not in (side, "both"):
            return None
        return self.attention_window // 2

    def _default_head_width(self, field: str) -> int:
        if self.num_heads < 1 or self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}, and {field} is not given: "
                f"choose a num_heads that divides d_model, or set {field}."
            )
        return self.d_model // self.num_heads

    def _reject_misspelled(self, unknown: dict) -> None:
        """Raise TypeError for a misspelled field; transformers ignores unknown fields."""
        known = [field.name for field in fields(self)]
        for name in set(unknown) - set(self.attribute_map):
            close = get_close_matches(name, known, n=1, cutoff=0.85)
            if close and abs(len(name) - len(close[0])) <= 1:
                raise TypeError(f"VaswaniConfig has no field {name!r}; did you mean {close[0]!r}?")

    def validate_architecture(self):
        """Validate the values of the fields; `strict` calls this method after `__init__` and before saving."""
        sizes = ("vocab_size", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_position_embeddings")
        for name in (*sizes, "decoder_layers"):  # generation tracks positions by the decoder's cache
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.source_vocab_size is not None and self.source_vocab_size < 1:
            raise ValueError(f"source_vocab_size must be at least 1, got {self.source_vocab_size}.")
        if self.encoder_layers < 0:
            raise ValueError(f"encoder_layers must not be negative, got {self.encoder_layers}.")
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        for name in ("layer_norm_eps", "embedding_init_std"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}.")
        if self.position_embedding not in POSITION_EMBEDDINGS:
            raise ValueError(
                f"position_embedding must be one of {', '.join(POSITION_EMBEDDINGS)}, got {self.position_embedding!r}."
            )
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(f"attention_window must be at least 1, got {self.attention_window}.")
        if self.attention_window_side not in WINDOW_SIDES:
            raise ValueError(
                f"attention_window_side must be one of {', '.join(WINDOW_SIDES)}, got {self.attention_window_side!r}."
            )
        if self.position_embedding == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model must be even for sinusoidal positions, got {self.d_model}.")
        super().validate_architecture()

    @classmethod
    def from_table3(cls, row: str, **overrides) -> "VaswaniConfig":
        """Configuration of one row of the paper's Table 3.

        Args:
            row (`str`): Key of `TABLE_3`: "base", "big", or the block's letter and its variation ("A-h1", "C-N2").
            **overrides: Fields that replace those of the row.

        Raises:
            ValueError: Unknown row.
            TypeError: Unknown field.
        """
        if row not in TABLE_3:
            raise ValueError(f"Table 3 has no row {row!r}; its rows are {', '.join(TABLE_3)}.")
        known = {field.name for field in fields(cls)} | set(cls.attribute_map)
        if unknown := sorted(set(overrides) - known):
            raise TypeError(f"VaswaniConfig has no field {', '.join(map(repr, unknown))}.")
        return cls(**{**TABLE_3[row], **overrides})


__all__ = ["TABLE_3", "VaswaniConfig"]
