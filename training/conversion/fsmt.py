"""FSMT of transformers, such as Facebook's models of WMT19, to a Vaswani model.

FSMT has fairseq's positions, which are not the paper's: the frequencies fall from 1 to 1/10000 exactly, and the first
position is 2. The result has them as a learned table, so all features keep their places.
"""

from pathlib import Path

import torch
from transformers import FSMTForConditionalGeneration, GenerationConfig

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..inference.loading import load_model
from .agreement import Conversion
from .fields import check_equal, check_fields, search_fields
from .tokenizer_files import tokenizer_files
from .weights import load_exactly, our_name


CONFIG = "config.json"
FIXED = {
    **{"scale_embedding": True, "encoder_layerdrop": 0, "decoder_layerdrop": 0},
    **{"normalize_before": False, "add_final_layer_norm": False, "normalize_embedding": False},
}
SAME_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "activation_function", "max_position_embeddings"),
    *("dropout", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
)
EPS = 1e-5  # of the layer normalisation in transformers' code


def read(folder: Path) -> Conversion:
    """Convert an FSMT checkpoint.

    Args:
        folder (`Path`): The checkpoint.

    Raises:
        ValueError: The model has no equal here, or a file is malformed. The message names file and field.
        OSError: A file is missing or damaged.
    """
    fsmt = load_model(folder, dtype=torch.float32).eval()
    values = fsmt.config.to_dict()
    check_fields(folder / CONFIG, values, FIXED)
    check_equal(folder / CONFIG, values, ("attention_heads", "ffn_dim"))
    return Conversion(from_fsmt(fsmt), fsmt, tokenizer_files(folder, "FSMTTokenizer"))


@torch.no_grad()
def from_fsmt(fsmt: FSMTForConditionalGeneration) -> VaswaniForConditionalGeneration:
    """Vaswani model that computes what an FSMT model does, for up to `max_position_embeddings` tokens.

    Equal matrices are tied, whatever the configuration says.
    """
    config, stacks = fsmt.config, {"encoder": fsmt.model.encoder, "decoder": fsmt.model.decoder}
    source, target, projection = (
        fsmt.model.get_parameter(name)
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
    )
    is_shared, is_tied = torch.equal(source, target), torch.equal(projection, target)
    weights = {"model.shared.weight": target}
    weights |= {} if is_shared else {"model.encoder.embed_tokens.weight": source}
    weights |= {} if is_tied else {"lm_head.weight": projection}
    for stack, module in stacks.items():
        layers = module.layers.state_dict()
        weights |= {f"model.{stack}.{our_name(f'layers.{name}')}": weight for name, weight in layers.items()}
        positions, first = module.embed_positions, config.pad_token_id + 1
        table = positions.get_embedding(config.max_position_embeddings + first, config.d_model, config.pad_token_id)
        weights[f"model.{stack}.embed_positions.weight"] = table[first:]

    model = VaswaniForConditionalGeneration(
        VaswaniConfig(
            vocab_size=len(target),
            source_vocab_size=None if is_shared else len(source),
            d_ff=config.encoder_ffn_dim,
            num_heads=config.encoder_attention_heads,
            attention_bias=True,
            tie_word_embeddings=is_tied,
            position_embedding="learned",
            layer_norm_eps=EPS,
            **{name: getattr(config, name) for name in SAME_FIELDS},
        )
    )
    load_exactly(model, weights)
    fields = {"length_penalty": 1.0, "length_penalty_form": "length", **search_fields(fsmt.generation_config)}
    model.generation_config = GenerationConfig(**fields)
    return model.eval()
