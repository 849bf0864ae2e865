"""Files of fairseq, and of FSMT with BPE codes."""

import json
from argparse import Namespace
from pathlib import Path

import torch
from transformers import FSMTForConditionalGeneration


MERGES = ["l o", "lo w</w>", "e r</w>", "lo w", "n e", "ne w", "new er</w>"]
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "l", "o", "w", "w</w>", "e", "r</w>", "n", "lo", "low</w>", "er</w>"]
TOKENS += ["low", "ne", "new", "newer</w>", "o</w>", "d</w>"]


def settings_of(fsmt: FSMTForConditionalGeneration, **changes) -> Namespace:
    config = fsmt.config
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (
            ("embed_dim", config.d_model),
            ("layers", config.encoder_layers),
            ("attention_heads", config.encoder_attention_heads),
            ("ffn_embed_dim", config.encoder_ffn_dim),
            ("normalize_before", False),
            ("learned_pos", False),
        )
    }
    rest = {"source_lang": "en", "target_lang": "de", "activation_fn": "relu", "max_source_positions": 64}
    return Namespace(**{**stacks, **rest, **changes})


def weights_of(fsmt: FSMTForConditionalGeneration, old: bool = False) -> dict[str, torch.Tensor]:
    """Weights under fairseq's names: those of the time of FSMT, or older ones."""
    weights = {
        name.removeprefix("model."): weight
        for name, weight in fsmt.state_dict().items()
        if "embed_positions" not in name
    }
    weights |= {"encoder.version": torch.tensor([3.0]), "encoder.embed_positions._float_tensor": torch.zeros(1)}
    if not old:
        return weights
    norms = {"encoder": ["self_attn_layer_norm", "final_layer_norm"]}
    norms["decoder"] = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
    result = {}
    for name, weight in weights.items():
        stack, last = name.split(".")[0], name.rsplit(".", 1)[-1]
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", letter)] for letter in ("q_proj", "k_proj", "v_proj")]
            result[name.replace(f"q_proj.{last}", f"in_proj_{last}")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            for number, norm in enumerate(norms[stack]):
                name = name.replace(norm, f"layer_norms.{number}") if f".{norm}." in name else name
            result[name.replace("decoder.output_projection.weight", "decoder.embed_out")] = weight
    return result


def write_fsmt(folder: Path, source: list[str] = TOKENS, target: list[str] = TOKENS) -> Path:
    (folder / "merges.txt").write_text("".join(f"{merge} 1\n" for merge in MERGES), encoding="utf-8")
    for name, tokens in (("src", source), ("tgt", target)):
        ids = {token: i for i, token in enumerate(tokens)}
        (folder / f"vocab-{name}.json").write_text(json.dumps(ids), encoding="utf-8")
    settings = {"langs": ["en", "de"], "tokenizer_class": "FSMTTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
