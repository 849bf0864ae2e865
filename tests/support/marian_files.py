"""Random models in Marian's own files."""

import json
from pathlib import Path

import numpy as np
import yaml


WORDS = [f"w{number}" for number in range(30)]
# Tokens that YAML could take for something else.
TOKENS = [
    "</s>",
    "<unk>",
    "null",
    "~",
    "yes",
    "1",
    "01",
    "1.0",
    ":",
    "#",
    "'",
    '"',
    "- a",
    "ü",
    "▁",
    "▁the",
    "\\",
    *WORDS,
]
SETTINGS = {
    "type": "transformer",
    "dim-emb": 32,
    "enc-depth": 2,
    "dec-depth": 3,
    "transformer-heads": 4,
    "transformer-dim-ffn": 48,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-guided-alignment-layer": "last",
    "tied-embeddings-all": True,
}


def arrays_of(settings: dict, source: int | None = None, target: int = len(TOKENS)) -> dict[str, np.ndarray]:
    """Random weights under Marian's names; matrices are stored inputs x outputs."""
    generator, width, inner = np.random.default_rng(0), settings["dim-emb"], settings["transformer-dim-ffn"]

    def random(*shape: int) -> np.ndarray:
        return generator.normal(0, 0.3, shape).astype(np.float32)

    arrays = {"decoder_ff_logit_out_b": random(1, target)}
    arrays |= {"Wemb": random(target, width)} if source is None else {}
    arrays |= {} if source is None else {"encoder_Wemb": random(source, width), "decoder_Wemb": random(target, width)}
    for stack, depth, attentions in (
        ("encoder", settings["enc-depth"], ["self"]),
        ("decoder", settings["dec-depth"], ["self", "context"]),
    ):
        for layer in range(1, depth + 1):
            name = f"{stack}_l{layer}"
            for attention in attentions:
                for letter in "qkvo":
                    arrays[f"{name}_{attention}_W{letter}"] = random(width, width)
                    arrays[f"{name}_{attention}_b{letter}"] = random(1, width)
            for part in [*(f"{attention}_Wo" for attention in attentions), "ffn_ffn"]:
                arrays[f"{name}_{part}_ln_scale"] = 1 + random(1, width)
                arrays[f"{name}_{part}_ln_bias"] = random(1, width)
            arrays |= {f"{name}_ffn_W1": random(width, inner), f"{name}_ffn_b1": random(1, inner)}
            arrays |= {f"{name}_ffn_W2": random(inner, width), f"{name}_ffn_b2": random(1, width)}
    return arrays


def write_model(folder: Path, settings: dict = SETTINGS, arrays: dict | None = None) -> Path:
    text = yaml.safe_dump(settings, allow_unicode=True).encode() + b"\0"
    arrays = arrays_of(settings) if arrays is None else arrays
    np.savez(folder / "model.npz", **arrays, **{"special:model.yml": np.frombuffer(text, dtype=np.int8)})
    return folder / "model.npz"


def write_vocabulary(path: Path, tokens: list[str]) -> Path:
    """As Marian does, one token a line, in quotes where YAML needs them."""
    quoted = [
        token if token.isalnum() or token in "~1.0" or token[0] in "<▁" else json.dumps(token) for token in tokens
    ]
    path.write_text("".join(f"{token}: {number}\n" for number, token in enumerate(quoted)), encoding="utf-8")
    return path


def write_folder(folder: Path, source: list[str] | None = None, **settings) -> list[Path]:
    """A model with one vocabulary or two; returns the files of both languages."""
    settings = {**SETTINGS, "tied-embeddings-all": source is None, **settings}
    write_model(folder, settings, arrays_of(settings, source=source and len(source)))
    target = write_vocabulary(folder / "target.yml", TOKENS)
    files = [target if source is None else write_vocabulary(folder / "source.yml", source), target]
    decoder = {"models": ["model.npz"], "vocabs": [path.name for path in files], "beam-size": 4, "normalize": 0.5}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder))
    return files
