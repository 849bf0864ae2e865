"""Turn a small trained model into one of base size that computes the same function.

    python -m training.benchmarks.enlarge --model runs/multi30k_en_de/average --output base_size

Decoding speed depends on the size of the model and on the lengths of its outputs. Training a model of base size until
its outputs have natural lengths takes days on a CPU. A small model trains fast, and the enlarged model produces the
same translations:

- Each feature of `d_model` is replicated, and each weight that reads it is divided by the number of copies.
- Each head is replicated, and its output weights are divided by the number of copies. `d_k`, `d_v` and `d_ff` are
  padded with zeros.
- The sub-layers of additional layers output zeros.
- The positions become a learned table, because sinusoids of a larger width have different frequencies.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..conversion.positions import position_table
from ..inference.loading import load_checkpoint


ATTENTIONS = ("self_attn", "encoder_attn")


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


def _larger(small: VaswaniConfig, row: str, max_positions: int) -> VaswaniConfig:
    """Configuration of the enlarged model.

    Raises:
        ValueError: The enlarged model would be smaller in some size.
    """
    config = VaswaniConfig.from_table3(
        row,
        **{name: getattr(small, name) for name in ("vocab_size", "attention_bias", "layer_norm_eps", "dropout")},
        **{name: getattr(small, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        decoder_start_token_id=small.decoder_start_token_id,
        position_embedding="learned",
        max_position_embeddings=max_positions,
    )
    for name in ("d_ff", "d_k", "d_v", "encoder_layers", "decoder_layers"):
        if getattr(config, name) < getattr(small, name):
            raise ValueError(f"{name}: a model with {getattr(small, name)} cannot grow to {getattr(config, name)}.")
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
        _grow_linear(to.feed_forward.fc1, layer.feed_forward.fc1, self.inner, self.features, 1 / self.copies)
        _grow_linear(to.feed_forward.fc2, layer.feed_forward.fc2, self.features, self.inner, 1)
        for name, module in layer.named_modules():
            if isinstance(module, nn.LayerNorm):
                self.norm(to.get_submodule(name), module)

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
def grow(model: VaswaniForConditionalGeneration, row: str = "base", max_positions: int = 512):
    """Enlarge a model without changing the function that it computes.

    Args:
        model (`VaswaniForConditionalGeneration`): The small model.
        row (`str`): Row of Table 3 that defines the size of the large model. Its `d_model` and `num_heads` must be
            multiples of the small model's, and no size may be smaller.
        max_positions (`int`): Length of the position table.

    Returns:
        `VaswaniForConditionalGeneration`: The large model.

    Raises:
        ValueError: A size of the large model is smaller, or not a multiple where it must be.
    """
    config = _larger(model.config, row, max_positions)
    growth = _Growth(config, model.config)
    torch.manual_seed(0)  # for the random queries and keys of additional layers, which have no effect
    large = AutoModelForSeq2SeqLM.from_config(config).eval()
    large.generation_config = model.generation_config
    for name in ("encoder", "decoder"):
        growth.stack(large.model.get_submodule(name), model.model.get_submodule(name))
    # Embeddings are multiplied by sqrt(d_model), and logits sum over all copies of a feature.
    large.model.shared.weight.copy_(model.model.shared.weight[:, growth.features] / growth.copies**0.5)
    norm = large.model.decoder.layers[-1].feed_forward_residual.norm
    norm.weight /= growth.copies**0.5
    norm.bias /= growth.copies**0.5
    return large


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.enlarge`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder of the small model")
    parser.add_argument("--row", default="base", help="row of Table 3 to grow to (%(default)s)")
    parser.add_argument("--output", required=True, help="folder to write")
    args = parser.parse_args(argv)
    model, tokenizer = load_checkpoint(args.model)
    grow(model, args.row).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
