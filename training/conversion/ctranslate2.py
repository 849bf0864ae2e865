"""Conversion of a model to the format of CTranslate2, an inference engine in C++."""

import copy
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.kernels_vaswani import Int8Linear

from ..files import folder_written_whole
from .agreement import NEW_TOKENS, Agreement, example_batch
from .fields import check_unrestricted
from .positions import position_count, position_table


try:
    from ctranslate2 import Translator
    from ctranslate2.converters import Converter
    from ctranslate2.converters.utils import fuse_linear
    from ctranslate2.specs import TransformerSpec, common_spec
    from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES as QUANTIZATIONS
except ModuleNotFoundError as error:
    raise ImportError(f"CTranslate2 is needed: pip install 'hf-vaswani[ctranslate2]' ({error}).") from error


# By the names of transformers.
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


class VaswaniConverter(Converter):
    """Converter of a Vaswani model. `write` also checks the arguments, and writes atomically.

    CTranslate2 multiplies weights in place when it quantises them, so it gets copies.

    Args:
        model (`VaswaniForConditionalGeneration`): Model to convert. It does not change.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer whose tokens become the vocabulary.

    Raises:
        ValueError: CTranslate2 cannot represent the model. The message names the field.
    """

    def __init__(self, model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase):
        _check(model)
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def _load(self) -> TransformerSpec:
        """Build the specification, which `convert` writes."""
        config, stacks = self.model.config, (self.model.model.encoder, self.model.model.decoder)
        spec = TransformerSpec.from_config(
            (config.encoder_layers, config.decoder_layers),
            config.num_heads,
            pre_norm=False,
            activation=common_spec.Activation[ACTIVATIONS[config.activation_function]],
        )
        for target, stack in zip((spec.encoder, spec.decoder), stacks):
            target.scale_embeddings = stack.embed_scale
            target.position_encodings.encodings = position_table(stack, position_count(config)).numpy()
            for layer_spec, layer in zip(target.layer, stack.layers):
                _copy_attention(layer_spec.self_attention, layer.self_attn, layer.self_attn_residual)
                if stack is stacks[1]:
                    _copy_attention(layer_spec.attention, layer.encoder_attn, layer.encoder_attn_residual)
                _copy_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
                _copy_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)
                _copy_norm(layer_spec.ffn.layer_norm, layer.feed_forward_residual)
        spec.encoder.embeddings[0].weight = _copy(self.model.model.encoder.embed_tokens.weight)
        spec.decoder.embeddings.weight = _copy(self.model.model.shared.weight)
        _copy_linear(spec.decoder.projection, self.model.lm_head)
        self._describe(spec)
        return spec

    def _describe(self, spec: TransformerSpec) -> None:
        """Register the vocabulary and the special tokens."""
        config = self.model.config
        tokens = vocabulary(self.tokenizer, config.vocab_size)
        spec.register_source_vocabulary(vocabulary(self.tokenizer, config.source_vocab_size or config.vocab_size))
        spec.register_target_vocabulary(tokens)
        start, end = special_tokens(self.model)
        spec.config.bos_token = spec.config.decoder_start_token = tokens[start]
        spec.config.eos_token = tokens[end]
        # CTranslate2 requires an unknown token; the vocabulary has none.
        spec.config.unk_token = tokens[config.pad_token_id or 0]
        spec.config.layer_norm_epsilon = config.layer_norm_eps


def write(
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    quantization: str = "float32",
) -> Agreement:
    """Write a model in the format of CTranslate2 atomically, with its tokenizer, and compare what was written.

    Args:
        model (`VaswaniForConditionalGeneration`): Model to convert. It does not change.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        folder (`str` or `Path`): Folder to write: a new or an empty one.
        quantization (`str`): Type of the weights, one of `QUANTIZATIONS`.

    Returns:
        The agreement. Only that of float32 has to hold; other types round the weights.

    Raises:
        ImportError: CTranslate2 is not installed; raised on the import of this module.
        OSError: `folder` is not empty, or cannot be written.
        ValueError: CTranslate2 cannot represent the model, or there is no such type. The message names the field.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization: expected one of {', '.join(QUANTIZATIONS)}, found {quantization!r}.")
    converter = VaswaniConverter(model, tokenizer)
    with folder_written_whole(Path(folder)) as partial:
        converter.convert(str(partial), quantization=quantization, force=True)
        tokenizer.save_pretrained(partial)
        agreement = _compare(model, tokenizer, partial)
        if quantization == "float32":
            agreement.check(folder)
    return agreement


@torch.no_grad()
def _compare(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Agreement:
    """Compare the greedy translations of a few sentences, and the log probabilities of the model's own."""
    if (model.device.type, model.dtype) != ("cpu", torch.float32):
        model = copy.deepcopy(model).to("cpu", torch.float32)
    batch, config = example_batch(model, tokenizer), model.config
    most = min(NEW_TOKENS, config.max_position_embeddings - 1)
    ids = _greedy(model, batch, most)[:, 1:]
    labels = ids.masked_fill(ids == config.pad_token_id, -100)
    logits = model(**batch, labels=labels).logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def tokens(rows: torch.Tensor, kept: torch.Tensor, size: int) -> list[list[str]]:
        names = vocabulary(tokenizer, size)
        return [[names[token] for token in row[mask].tolist()] for row, mask in zip(rows, kept.bool())]

    sources = tokens(batch["input_ids"], batch["attention_mask"], config.source_vocab_size or config.vocab_size)
    written, (_, end) = labels != -100, special_tokens(model)
    inner = tokens(ids, written & (ids != end), config.vocab_size)  # CTranslate2 adds the end token
    translator = Translator(str(folder), device="cpu", intra_threads=torch.get_num_threads())
    limits = {"max_decoding_length": most, "min_decoding_length": 0, "max_input_length": 0}
    found = translator.translate_batch(sources, beam_size=1, **limits)
    scored = translator.score_batch(sources, inner, max_input_length=0)
    worst = greatest = 0.0
    for own, kept, other in zip(logits, written, scored):
        expected = own[kept]
        others = torch.tensor(other.log_probs)[: len(expected)]  # without an end token that the model did not reach
        worst = max(worst, float((others - expected).abs().max()))
        greatest = max(greatest, float(expected.abs().max()))
    equal = sum(result.hypotheses[0] == own for result, own in zip(found, inner))
    return Agreement(len(inner), worst / max(greatest, 1.0), equal, "log probabilities")


def _greedy(model: VaswaniForConditionalGeneration, batch: dict, most: int) -> torch.Tensor:
    """Translate `batch` by at most so many tokens, without the constraints that the model's settings may have."""
    settings = model.generation_config
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(settings, name) for name in ids})
    try:
        return model.generate(**batch, max_new_tokens=most)
    finally:
        model.generation_config = settings


def _check(model: VaswaniForConditionalGeneration) -> None:
    """Raise ValueError for a model that CTranslate2 cannot represent."""
    if not isinstance(model, VaswaniForConditionalGeneration):
        raise ValueError(f"CTranslate2: expected a Vaswani model, found {type(model).__name__}.")
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("CTranslate2: expected a model before to_int8(); it quantises the weights itself.")
    if (activation := model.config.activation_function) not in ACTIVATIONS:
        raise ValueError(
            f"CTranslate2: activation_function: expected one of {', '.join(ACTIVATIONS)}, found {activation!r}."
        )
    if model.config.encoder_layers < 1:
        raise ValueError(f"CTranslate2: encoder_layers: expected at least 1, found {model.config.encoder_layers}.")
    check_unrestricted("CTranslate2", model.config)
    special_tokens(model)


def special_tokens(model: VaswaniForConditionalGeneration) -> tuple[int, int]:
    """Start token of the decoder, and end token, as `generate()` uses them.

    Raises:
        ValueError: There is none, or several end tokens.
    """
    settings = model.generation_config
    start, end = settings.decoder_start_token_id, settings.eos_token_id
    start = settings.bos_token_id if start is None else start
    ends = end if isinstance(end, list) else [end]
    if start is None:
        raise ValueError("CTranslate2: decoder_start_token_id: expected an id, found none, nor a bos_token_id.")
    if len(ends) != 1 or ends[0] is None:
        raise ValueError(f"CTranslate2: eos_token_id: expected one id, found {end}.")
    return start, ends[0]


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """Token of each id. Ids that the tokenizer lacks, which pad the model's matrices, get names of their own.

    Raises:
        ValueError: Two ids have the same token.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    tokens = [f"<unused {index}>" if token is None else token for index, token in enumerate(tokens)]
    if len(set(tokens)) < size:
        twice = next(token for index, token in enumerate(tokens) if token in tokens[:index])
        raise ValueError(f"CTranslate2: the tokenizer has two ids for {twice!r}; expected different tokens.")
    return tokens


def _copy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> common_spec.LinearSpec:
    spec = common_spec.LinearSpec()
    spec.weight = _copy(weight)
    if bias is not None:
        spec.bias = _copy(bias)
    return spec


def _copy_linear(target, module: nn.Linear) -> None:
    fuse_linear(target, [_linear(module.weight, module.bias)])


def _copy_norm(target, residual: nn.Module) -> None:
    target.gamma, target.beta = _copy(residual.norm.weight), _copy(residual.norm.bias)


def _copy_attention(target: MultiHeadAttentionSpec, attention: nn.Module, residual: nn.Module) -> None:
    """Copy an attention layer. CTranslate2 has one width for queries, keys and values: narrower ones get zeros."""
    width = max(attention.d_k, attention.d_v)

    def heads(module: nn.Linear, own_width: int) -> common_spec.LinearSpec:
        """A projection to heads of `own_width` features, widened by zeros."""
        bias = None if module.bias is None else _widened(module.bias[:, None], own_width, width)[:, 0]
        return _linear(_widened(module.weight, own_width, width), bias)

    projections = [heads(attention.q_proj, attention.d_k), heads(attention.k_proj, attention.d_k)]
    projections.append(heads(attention.v_proj, attention.d_v))
    split = [projections] if len(target.linear) == 2 else [projections[:1], projections[1:]]
    output = _linear(_widened(attention.o_proj.weight.T, attention.d_v, width).T, attention.o_proj.bias)
    for linear, parts in zip(target.linear, [*split, [output]]):
        fuse_linear(linear, parts)
    target.queries_scale = attention.d_k**-0.5
    _copy_norm(target.layer_norm, residual)


def _widened(weight: torch.Tensor, own_width: int, width: int) -> torch.Tensor:
    """Append zeros to the features of each head: `(heads * own_width, n)` becomes `(heads * width, n)`."""
    return F.pad(weight.unflatten(0, (-1, own_width)), (0, 0, 0, width - own_width)).flatten(0, 1)
