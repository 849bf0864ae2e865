"""A small trained model as one of base size that computes the same function.

    python -m training.benchmarks.grow --model runs/multi30k_en_de/average --output base_size

Speed depends on the size of a model and on the lengths of its outputs. To train a model of base size until its
outputs have natural lengths takes days on a CPU; a small one is soon trained, and grown it writes the same sentences:

- every feature of `d_model` is there several times over, and every weight that reads it is divided by their number;
- every head is there several times over, and its share of the output is divided by their number; in `d_k`, `d_v` and
  `d_ff` zeros are added;
- layers are added whose sub-layers write zeros;
- the positions become a learned table, since wider sinusoids would have other frequencies.
"""

import argparse

import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..translate import load_checkpoint
from .peers import position_table


def _times(large: VaswaniConfig, small: VaswaniConfig, name: str) -> int:
    wanted, found = getattr(large, name), getattr(small, name)
    if wanted % found:
        raise ValueError(f"{name}: a model with {found} cannot grow to {wanted}, which is not a multiple.")
    return wanted // found


def _grow_linear(large: nn.Linear, small: nn.Linear, rows: torch.Tensor, columns: torch.Tensor, scale: float) -> None:
    """Put `small`, times `scale`, wherever `rows` and `columns` say which of its rows and columns goes; -1 is zero."""
    weight = small.weight[rows.clamp(min=0)][:, columns.clamp(min=0)] * scale
    large.weight.copy_(weight * (rows >= 0)[:, None] * (columns >= 0))
    if small.bias is not None:
        large.bias.copy_(small.bias[rows.clamp(min=0)] * (rows >= 0))


@torch.no_grad()
def grow(model: VaswaniForConditionalGeneration, row: str = "base", max_positions: int = 512):
    """The same function in a larger model.

    Args:
        model (`VaswaniForConditionalGeneration`): The small model.
        row (`str`): The size to grow to, a row of Table 3. Its `d_model` and `num_heads` must be multiples of the
            small model's, and nothing of it smaller.
        max_positions (`int`): Length of the table of positions.

    Raises:
        ValueError: The sizes do not fit.
    """
    small = model.config
    config = VaswaniConfig.from_table3(
        row,
        **{name: getattr(small, name) for name in ("vocab_size", "attention_bias", "layer_norm_eps", "dropout")},
        **{name: getattr(small, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        decoder_start_token_id=small.decoder_start_token_id,
        position_embedding="learned",
        max_position_embeddings=max_positions,
    )
    copies, head_copies = _times(config, small, "d_model"), _times(config, small, "num_heads")
    for name in ("d_ff", "d_k", "d_v", "encoder_layers", "decoder_layers"):
        if getattr(config, name) < getattr(small, name):
            raise ValueError(f"{name}: a model with {getattr(small, name)} cannot grow to {getattr(config, name)}.")
    torch.manual_seed(0)  # of the queries and keys of the new layers, which are not listened to
    large = VaswaniForConditionalGeneration._from_config(config).eval()
    large.generation_config = model.generation_config

    features = torch.arange(small.d_model).repeat(copies)

    def heads(name: str) -> torch.Tensor:
        wide, narrow = getattr(config, name), getattr(small, name)
        places = torch.full((config.num_heads, wide), -1)
        places[:, :narrow] = torch.arange(small.num_heads * narrow).view(-1, narrow).repeat(head_copies, 1)
        return places.flatten()

    inner = torch.full((config.d_ff,), -1)
    inner[: small.d_ff] = torch.arange(small.d_ff)

    def grow_layer(to: nn.Module, layer: nn.Module) -> None:
        for name in ("self_attn", "encoder_attn"):
            if not hasattr(layer, name):
                continue
            new, old = getattr(to, name), getattr(layer, name)
            sharper = (config.d_k / small.d_k) ** 0.5  # scores are divided by the root of d_k
            _grow_linear(new.q_proj, old.q_proj, heads("d_k"), features, sharper / copies)
            if old.q_proj.bias is not None:
                new.q_proj.bias *= sharper
            _grow_linear(new.k_proj, old.k_proj, heads("d_k"), features, 1 / copies)
            _grow_linear(new.v_proj, old.v_proj, heads("d_v"), features, 1 / copies)
            _grow_linear(new.o_proj, old.o_proj, features, heads("d_v"), 1 / head_copies)
        _grow_linear(to.feed_forward.fc1, layer.feed_forward.fc1, inner, features, 1 / copies)
        _grow_linear(to.feed_forward.fc2, layer.feed_forward.fc2, features, inner, 1)
        for name, module in layer.named_modules():
            if isinstance(module, nn.LayerNorm):
                to.get_submodule(name).weight.copy_(module.weight[features])
                to.get_submodule(name).bias.copy_(module.bias[features])

    for name in ("encoder", "decoder"):
        stack, new = model.model.get_submodule(name), large.model.get_submodule(name)
        new.embed_positions.weight.copy_(position_table(stack, max_positions)[:, features])
        for to, layer in zip(new.layers, stack.layers):
            grow_layer(to, layer)
        # What is normalised already stays as it is; so the last of all norms takes the gain and bias, the new ones
        # before it have none.
        last = stack.layers[-1].feed_forward_residual.norm
        for layer in new.layers[len(stack.layers) :]:
            for module in layer.modules():
                if isinstance(module, nn.LayerNorm):
                    module.reset_parameters()
            for attention in ("self_attn", "encoder_attn"):
                if hasattr(layer, attention):
                    nn.init.zeros_(getattr(layer, attention).o_proj.weight)
            nn.init.zeros_(layer.feed_forward.fc2.weight)
        new.layers[len(stack.layers) - 1].feed_forward_residual.norm.reset_parameters()
        new.layers[-1].feed_forward_residual.norm.weight.copy_(last.weight[features])
        new.layers[-1].feed_forward_residual.norm.bias.copy_(last.bias[features])
    # Embeddings are multiplied by the root of d_model, and logits are sums over all copies of a feature.
    large.model.shared.weight.copy_(model.model.shared.weight[:, features] / copies**0.5)
    norm = large.model.decoder.layers[-1].feed_forward_residual.norm
    norm.weight /= copies**0.5
    norm.bias /= copies**0.5
    return large


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.grow`."""
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
