"""Marian's own format to a Vaswani model: a model `.npz`, vocabularies `.yml`, and the settings `decoder.yml`.

These are the files in the archives of OPUS-MT and of Marian's training. The weights become a MarianMT model in memory,
which `marian.py` converts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from ..inference.checkpoint_files import one_line_errors
from .agreement import Conversion
from .fields import check_fields
from .marian import LONGEST, SHUT, convert
from .tokenizer_files import tokenizer_files
from .weights import load_exactly


DECODER = "decoder.yml"
SETTINGS = "special:model.yml"  # array with the settings of the model, as text in bytes that ends in NUL
EOS, UNK, PAD = "</s>", "<unk>", "<pad>"
ACTIVATIONS = ("relu", "swish", "gelu")
FIXED = {
    "type": "transformer",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-train-positions": False,
    "transformer-tied-layers": [],
    "transformer-ffn-depth": 2,
    "transformer-decoder-dim-ffn": 0,
    "transformer-decoder-ffn-depth": 0,
    "layer-normalization": False,
    "lemma-dim-emb": 0,
    "output-omit-bias": False,
}
SIZES = ("dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn")
# Names of a layer's parts: Marian's, those of MarianMT.
ATTENTIONS = {"self": "self_attn", "context": "encoder_attn"}
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def read(folder: Path, as_trained: bool = False) -> Conversion:
    """Convert a model of Marian.

    Args:
        folder (`Path`): Folder with one `.npz`, and its vocabularies: those that `decoder.yml` names, or all `.yml`
            beside it. `source.spm` and `target.spm` are kept if they are there.
        as_trained (`bool`): Compute as Marian itself does, see `marian.restore_training`, not as transformers does.

    Raises:
        ValueError: The model has no equal here, or a file is malformed. The message names file and field.
        OSError: A file is missing or damaged.
    """
    path = _only(sorted(folder.glob("*.npz")), f"{folder}: expected one .npz")
    arrays, settings = _load(path)
    decoder = _read_yaml(folder / DECODER) if (folder / DECODER).is_file() else {}
    vocabularies = [_read_vocabulary(file) for file in _vocabulary_files(folder, decoder)]
    with one_line_errors(path):
        marian, names = _to_marian_mt(arrays, settings, vocabularies, decoder, path)
        model, reference = convert(marian, path, as_trained)
    settings = {"separate_vocabs": True} if len(names) == 2 else {}
    return Conversion(model, reference, tokenizer_files(folder, "MarianTokenizer", settings, **names))


def _only(paths: list[Path], expected: str) -> Path:
    if len(paths) != 1:
        raise ValueError(f"{expected}, found {', '.join(path.name for path in paths) or 'none'}.")
    return paths[0]


def _load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays of a model and its settings. Pickled objects are refused, not run.

    Raises:
        ValueError: The file is not an archive of plain arrays, or has no settings.
    """
    with one_line_errors(path), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if SETTINGS not in arrays:
        raise ValueError(f"{path}: {SETTINGS}: expected the settings of a Marian model, found none.")
    with one_line_errors(f"{path}: {SETTINGS}"):
        text = arrays.pop(SETTINGS).tobytes().rstrip(b"\0").decode("utf-8")
        settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: {SETTINGS}: expected names and values, found {type(settings).__name__}.")
    return arrays, settings


def _read_yaml(path: Path) -> dict[str, Any]:
    with one_line_errors(path):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected names and values, found {type(content).__name__}.")
    return content


def _vocabulary_files(folder: Path, decoder: Mapping[str, Any]) -> list[Path]:
    """One vocabulary for both languages, or those of source and target.

    Raises:
        ValueError: There are none, or too many to tell.
    """
    if names := decoder.get("vocabs"):
        files = list(dict.fromkeys(folder / Path(str(name)).name for name in names))
    else:
        files = [path for path in sorted(folder.glob("*.yml")) if path.name != DECODER]
        if len(files) > 1:
            raise ValueError(f"{folder}: expected one .yml vocabulary, or {DECODER} with vocabs, found {len(files)}.")
    if not 1 <= len(files) <= 2:
        raise ValueError(f"{folder}: expected one or two .yml vocabularies, found {len(files)}.")
    return files


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Ids of tokens. Every token stays text, also one like `null` or `1`.

    Raises:
        ValueError: The file is malformed, ids are not 0, 1, 2, ..., or `</s>` is missing.
    """
    with one_line_errors(path):
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
        ids = {token: int(number) for token, number in content.items()}
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path}: expected the ids 0 to {len(ids) - 1}, each once.")
    if EOS not in ids:
        raise ValueError(f"{path}: expected a token {EOS}, found none.")
    return ids


def _to_marian_mt(
    arrays: dict[str, np.ndarray],
    settings: dict[str, Any],
    vocabularies: list[dict[str, int]],
    decoder: Mapping[str, Any],
    path: Path,
) -> tuple[MarianMTModel, dict[str, dict[str, int]]]:
    """Build a MarianMT model, and the vocabularies of its tokenizer by the names of their files."""
    place = f"{path}: {SETTINGS}"
    check_fields(place, settings, FIXED)
    if missing := [name for name in SIZES if name not in settings]:
        raise ValueError(f"{place}: expected {', '.join(SIZES)}, found no {', '.join(missing)}.")
    if (activation := settings.get("transformer-ffn-activation", "swish")) not in ACTIVATIONS:
        raise ValueError(
            f"{place}: transformer-ffn-activation: expected one of {', '.join(ACTIVATIONS)}, found {activation!r}."
        )
    weights = dict(_renamed(arrays, settings))
    source, target = weights.pop("source"), weights.pop("target")
    for embedding, ids in ((source, vocabularies[0]), (target, vocabularies[-1])):
        if len(embedding) != len(ids):
            raise ValueError(
                f"expected embeddings of {len(ids)} tokens, as the vocabulary has, found {len(embedding)}."
            )
    # Padding follows both vocabularies; its embedding, which the decoder reads first, is zero.
    pad = max(len(source), len(target))
    bias = weights.pop("bias")
    bias = torch.cat((bias, bias.new_full((pad - len(bias),), SHUT), bias.new_zeros(1)))
    source, target = (
        torch.cat((rows, rows.new_zeros(pad + 1 - len(rows), rows.shape[1]))) for rows in (source, target)
    )
    shared = "Wemb" in arrays
    weights |= (
        {"model.shared.weight": target}
        if shared
        else {"model.encoder.embed_tokens.weight": source, "model.decoder.embed_tokens.weight": target}
    )
    marian = MarianMTModel(_config(settings, activation, pad, vocabularies[-1][EOS], shared))
    for stack in ("encoder", "decoder"):
        name = f"model.{stack}.embed_positions.weight"
        weights[name] = marian.get_parameter(name)
    load_exactly(marian, {**weights, "final_logits_bias": bias[None]})
    marian.generation_config = _search(decoder, marian.config)
    names = ["vocab", "target_vocab"][: 1 if shared else 2]
    return marian.eval(), {name: {**ids, PAD: pad} for name, ids in zip(names, (vocabularies[0], vocabularies[-1]))}


def _renamed(arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under MarianMT's names; the embeddings as "source" and "target", the output bias as "bias".

    Raises:
        ValueError: An array is missing, left over, or not of floating point numbers.
    """
    left = set(arrays)

    def take(name: str) -> torch.Tensor:
        if name not in arrays:
            raise ValueError(f"{name}: expected an array of this name, found none.")
        if arrays[name].dtype not in (np.float32, np.float16):
            raise ValueError(f"{name}: expected float32 or float16, found {arrays[name].dtype}.")
        left.discard(name)
        return torch.from_numpy(arrays[name].astype(np.float32))

    def linear(marian: str, theirs: str) -> Iterator[tuple[str, torch.Tensor]]:
        prefix, _, letter = marian.rpartition("_")
        yield f"{theirs}.weight", take(f"{prefix}_W{letter}").t()
        yield f"{theirs}.bias", take(f"{prefix}_b{letter}").flatten()

    def norm(marian: str, theirs: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{theirs}.weight", take(f"{marian}_ln_scale").flatten()
        yield f"{theirs}.bias", take(f"{marian}_ln_bias").flatten()

    for stack, depth, attentions in (
        ("encoder", settings["enc-depth"], ("self",)),
        ("decoder", settings["dec-depth"], ("self", "context")),
    ):
        for index in range(depth):
            marian, theirs = f"{stack}_l{index + 1}", f"model.{stack}.layers.{index}"
            for attention in attentions:
                for letter, projection in PROJECTIONS.items():
                    yield from linear(
                        f"{marian}_{attention}_{letter}", f"{theirs}.{ATTENTIONS[attention]}.{projection}"
                    )
                yield from norm(f"{marian}_{attention}_Wo", f"{theirs}.{ATTENTIONS[attention]}_layer_norm")
            yield from linear(f"{marian}_ffn_1", f"{theirs}.fc1")
            yield from linear(f"{marian}_ffn_2", f"{theirs}.fc2")
            yield from norm(f"{marian}_ffn_ffn", f"{theirs}.final_layer_norm")
    shared = "Wemb" in arrays
    yield "source", take("Wemb" if shared else "encoder_Wemb")
    yield "target", take("Wemb" if shared else "decoder_Wemb")
    yield "bias", take("decoder_ff_logit_out_b").flatten()
    if left:
        first = sorted(left)[:3]
        raise ValueError(f"arrays that no part of a tied post-norm Transformer has: {', '.join(first)}.")


def _config(settings: dict[str, Any], activation: str, pad: int, eos: int, shared: bool) -> MarianConfig:
    return MarianConfig(
        vocab_size=pad + 1,
        decoder_vocab_size=pad + 1,
        share_encoder_decoder_embeddings=shared,
        d_model=settings["dim-emb"],
        encoder_layers=settings["enc-depth"],
        decoder_layers=settings["dec-depth"],
        encoder_attention_heads=settings["transformer-heads"],
        decoder_attention_heads=settings["transformer-heads"],
        encoder_ffn_dim=settings["transformer-dim-ffn"],
        decoder_ffn_dim=settings["transformer-dim-ffn"],
        activation_function=activation,
        dropout=settings.get("transformer-dropout", 0.0),
        attention_dropout=settings.get("transformer-dropout-attention", 0.0),
        activation_dropout=settings.get("transformer-dropout-ffn", 0.0),
        scale_embedding=True,
        max_position_embeddings=LONGEST,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=eos,
        forced_eos_token_id=eos,
    )


def _search(decoder: Mapping[str, Any], config: MarianConfig) -> GenerationConfig:
    """Search of `decoder.yml`: beams, and the exponent `normalize` of the length."""
    return GenerationConfig(
        num_beams=int(decoder.get("beam-size", 6)),
        length_penalty=float(decoder.get("normalize", 1.0)),
        max_length=LONGEST,
        bad_words_ids=[[config.pad_token_id]],
        renormalize_logits=True,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        forced_eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.pad_token_id,
    )
