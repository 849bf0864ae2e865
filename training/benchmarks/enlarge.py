"""Turn a small trained model into one of base size, or of the shape of OPUS-MT, that computes the same function.

    python -m training.benchmarks.enlarge --model runs/multi30k_en_de/average --output base_size
    python -m training.benchmarks.enlarge --model runs/multi30k_en_de/average --shape opus-mt --output opus_size

Decoding speed depends on the size of the model and on the lengths of its outputs. Random weights never end a sentence,
and training a model of base size until its outputs have natural lengths takes days on a CPU. A small model trains
fast, and the enlarged model produces the same translations:

- Each feature of `d_model` is replicated, and each weight that reads it is divided by the number of copies.
- Each head is replicated, and its output weights are divided by the number of copies. `d_k`, `d_v` and `d_ff` are
  padded with zeros.
- The sub-layers of additional layers output zeros, and additional biases are zero.
- The positions become a learned table, because sinusoids of a larger width have different frequencies.
- Additional tokens are never generated: a bias of the output projection rules them out.
- Swish in place of ReLU: `swish(s x) / s` is within `0.28 / s` of `max(0, x)`, with `s` = 16,384.
"""

import argparse
import copy
import json

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from hf_vaswani import TABLE_3, VaswaniConfig, VaswaniForConditionalGeneration

from ..conversion.marian import SHUT
from ..conversion.positions import position_count, position_table
from ..inference.loading import load_checkpoint
from ..options import positive


ATTENTIONS = ("self_attn", "encoder_attn")
# Shapes beside the rows of Table 3.
OPUS_MT = {"vocab_size": 58_101, "activation_function": "swish", "attention_bias": True, "output_bias": True}
SHAPES = {**{row: {} for row in TABLE_3}, "opus-mt": OPUS_MT}
SHARPNESS = 2.0**14  # of a swish that stands in for a ReLU


def _copies(large: VaswaniConfig, small: VaswaniConfig, name: str) -> int:
    large_size, small_size = getattr(large, name), getattr(small, name)
    if large_size % small_size:
        raise ValueError(f"{name}: a model with {small_size} cannot grow to {large_size}, expected a multiple.")
    return large_size // small_size


def _grow_linear(large: nn.Linear, small: nn.Linear, rows: torch.Tensor, columns: torch.Tensor, scale: float) -> None:
    """Copy the weight of `small`, times `scale`, and its bias. `rows` and `columns` index `small`; -1 is zero."""
    weight = small.weight[rows.clamp(min=0)][:, columns.clamp(min=0)] * scale
    large.weight.copy_(weight * (rows >= 0)[:, None] * (columns >= 0))
    if small.bias is not None:
        large.bias.copy_(small.bias[rows.clamp(min=0)] * (rows >= 0))


def _larger(small: VaswaniConfig, shape: str, vocab_size: int | None, max_positions: int) -> VaswaniConfig:
    """Configuration of the enlarged model.

    Raises:
        ValueError: The enlarged model would be smaller in some size, or could not compute the same function.
    """
    kept = ("vocab_size", "attention_bias", "output_bias", "activation_function", "layer_norm_eps", "dropout")
    fields = {name: getattr(small, name) for name in kept} | SHAPES[shape]
    fields["vocab_size"] = vocab_size or fields["vocab_size"]
    fields["output_bias"] = fields["output_bias"] or fields["vocab_size"] > small.vocab_size
    config = VaswaniConfig.from_table3(
        shape if shape in TABLE_3 else "base",
        **fields,
        **{name: getattr(small, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        decoder_start_token_id=small.decoder_start_token_id,
        position_embedding="learned",
        max_position_embeddings=min(max_positions, position_count(small)),
    )
    for name in ("vocab_size", "d_ff", "d_k", "d_v", "encoder_layers", "decoder_layers"):
        if getattr(config, name) < getattr(small, name):
            raise ValueError(f"{name}: a model with {getattr(small, name)} cannot grow to {getattr(config, name)}.")
    if small.source_vocab_size is not None or not small.tie_word_embeddings:
        raise ValueError("tie_word_embeddings: a model with several embeddings cannot grow, expected one.")
    activations = small.activation_function, config.activation_function
    if activations[0] != activations[1] and activations != ("relu", "swish"):
        raise ValueError(f"activation_function: a model with {activations[0]} cannot grow to {activations[1]}.")
    return config


class _Growth:
    """Mapping from the dimensions of the large model to indices of the small one; -1 is zero padding."""

    def __init__(self, config: VaswaniConfig, small: VaswaniConfig):
        self.copies, self.head_copies = _copies(config, small, "d_model"), _copies(config, small, "num_heads")
        self.features = torch.arange(small.d_model).repeat(self.copies)
        self.inner = F.pad(torch.arange(small.d_ff), (0, config.d_ff - small.d_ff), value=-1)
        self.keys = self._heads(small.num_heads, small.d_k, config.d_k)
        self.values = self._heads(small.num_heads, small.d_v, config.d_v)
        self.query_scale = (config.d_k / small.d_k) ** 0.5  # makes up for the division of the scores by sqrt(d_k)
        self.sharpness = 1.0 if config.activation_function == small.activation_function else SHARPNESS

    def _heads(self, count: int, narrow: int, wide: int) -> torch.Tensor:
        indices = F.pad(torch.arange(count * narrow).view(count, narrow), (0, wide - narrow), value=-1)
        return indices.repeat(self.head_copies, 1).flatten()

    def norm(self, to: nn.LayerNorm, norm: nn.LayerNorm) -> None:
        to.weight.copy_(norm.weight[self.features])
        to.bias.copy_(norm.bias[self.features])

    def layer(self, to: nn.Module, layer: nn.Module) -> None:
        """Copy a layer."""
        for name in ATTENTIONS:
            if not hasattr(layer, name):
                continue
            new, old = getattr(to, name), getattr(layer, name)
            _grow_linear(new.q_proj, old.q_proj, self.keys, self.features, self.query_scale / self.copies)
            if old.q_proj.bias is not None:
                new.q_proj.bias *= self.query_scale
            _grow_linear(new.k_proj, old.k_proj, self.keys, self.features, 1 / self.copies)
            _grow_linear(new.v_proj, old.v_proj, self.values, self.features, 1 / self.copies)
            _grow_linear(new.o_proj, old.o_proj, self.features, self.values, 1 / self.head_copies)
        self.feed_forward(to.feed_forward, layer.feed_forward)
        for name, module in layer.named_modules():
            if isinstance(module, nn.LayerNorm):
                self.norm(to.get_submodule(name), module)

    def feed_forward(self, to: nn.Module, feed_forward: nn.Module) -> None:
        _grow_linear(to.fc1, feed_forward.fc1, self.inner, self.features, self.sharpness / self.copies)
        to.fc1.bias *= self.sharpness
        _grow_linear(to.fc2, feed_forward.fc2, self.features, self.inner, 1 / self.sharpness)

    def stack(self, to: nn.Module, stack: nn.Module) -> None:
        """Copy an encoder or decoder and add layers without effect.

        An additional layer only normalises, which leaves normalised features unchanged. The gain and bias of the last
        original norm therefore move to the last norm of the stack, and the norms in between are reset.
        """
        to.embed_positions.weight.copy_(position_table(stack, len(to.embed_positions.weight))[:, self.features])
        for new, layer in zip(to.layers, stack.layers):
            self.layer(new, layer)
        for layer in to.layers[len(stack.layers) :]:
            _make_idle(layer)
        to.layers[len(stack.layers) - 1].feed_forward_residual.norm.reset_parameters()
        self.norm(to.layers[-1].feed_forward_residual.norm, stack.layers[-1].feed_forward_residual.norm)


def _make_idle(layer: nn.Module) -> None:
    """Reset the norms of a layer and zero the outputs of its sub-layers."""
    for module in layer.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    for name in ATTENTIONS:
        if hasattr(layer, name):
            nn.init.zeros_(getattr(layer, name).o_proj.weight)
    nn.init.zeros_(layer.feed_forward.fc2.weight)


@torch.no_grad()
def grow(
    model: VaswaniForConditionalGeneration,
    shape: str = "base",
    vocab_size: int | None = None,
    max_positions: int = 512,
) -> VaswaniForConditionalGeneration:
    """Enlarge a model without changing the function that it computes.

    Args:
        model (`VaswaniForConditionalGeneration`): The small model.
        shape (`str`): Key of `SHAPES`: the size of the large model. Its `d_model` and `num_heads` must be multiples of
            the small model's, and no size may be smaller.
        vocab_size (`int`, *optional*): Size of the vocabulary; by default that of the shape, or else of the model.
        max_positions (`int`): Length of the position table, or less if the small model has a shorter one.

    Returns:
        `VaswaniForConditionalGeneration`: The large model.

    Raises:
        ValueError: A size of the large model is smaller, or not a multiple where it must be, or the model has a field
            that cannot change. The message names the field.
    """
    config = _larger(model.config, shape, vocab_size, max_positions)
    growth = _Growth(config, model.config)
    torch.manual_seed(0)  # for the random queries and keys of additional layers, which have no effect
    large = AutoModelForSeq2SeqLM.from_config(config).eval()
    large.generation_config = model.generation_config
    for name in ("encoder", "decoder"):
        growth.stack(large.model.get_submodule(name), model.model.get_submodule(name))
    # Embeddings are multiplied by sqrt(d_model), and logits sum over all copies of a feature.
    tokens = model.config.vocab_size
    large.model.shared.weight[:tokens] = model.model.shared.weight[:, growth.features] / growth.copies**0.5
    norm = large.model.decoder.layers[-1].feed_forward_residual.norm
    norm.weight /= growth.copies**0.5
    norm.bias /= growth.copies**0.5
    if config.output_bias:
        large.lm_head.bias[:tokens] = model.lm_head.bias if model.config.output_bias else 0
        large.lm_head.bias[tokens:] = SHUT
    return large


def grow_tokenizer(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> PreTrainedTokenizerFast:
    """Enlarge a BPE vocabulary by tokens without merges, which no text contains.

    Raises:
        ValueError: The tokenizer is no BPE.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if content["model"]["type"] != "BPE":
        raise ValueError(f"tokenizer: expected a BPE vocabulary to enlarge, found {content['model']['type']}.")
    content["model"]["vocab"] |= {f"<unused {index}>": index for index in range(len(tokenizer), vocab_size)}
    grown = copy.deepcopy(tokenizer)
    grown.backend_tokenizer.model = Tokenizer.from_str(json.dumps(content)).model
    return grown


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.enlarge`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder of the small model")
    parser.add_argument("--shape", choices=SHAPES, default="base", help="row of Table 3, or opus-mt (%(default)s)")
    parser.add_argument("--vocab-size", type=positive, help="entries of the vocabulary (the shape's, or the model's)")
    parser.add_argument("--output", required=True, help="folder to write")
    args = parser.parse_args(argv)
    model, tokenizer = load_checkpoint(args.model)
    large = grow(model, args.shape, args.vocab_size)
    large.save_pretrained(args.output)
    grow_tokenizer(tokenizer, large.config.vocab_size).save_pretrained(args.output)


if __name__ == "__main__":
    main()
