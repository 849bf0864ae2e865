"""fairseq's own files to a Vaswani model: a checkpoint `.pt` and the dictionaries `dict.LANGUAGE.txt` beside it.

The checkpoint is a pickle. It is read as plain weights and numbers only, so it runs no code; one that holds more, as
those of fairseq 1.0 do, is refused. The weights become an FSMT model in memory, which `fsmt.py` converts.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

from ..inference.checkpoint_files import one_line_errors
from .agreement import Conversion
from .fields import check_equal, check_fields
from .fsmt import from_fsmt
from .tokenizer_files import CODES, tokenizer_files
from .weights import load_exactly


SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 of every dictionary
FIXED = {
    **{"encoder_normalize_before": False, "decoder_normalize_before": False, "layernorm_embedding": False},
    **{"encoder_learned_pos": False, "decoder_learned_pos": False, "no_token_positional_embeddings": False},
    **{"no_scale_embedding": False, "adaptive_softmax_cutoff": None, "no_cross_attention": False},
    **{"cross_self_attention": False, "encoder_layerdrop": 0, "decoder_layerdrop": 0},
}
SAME_IN_BOTH_STACKS = ("embed_dim", "ffn_embed_dim", "attention_heads")
COUNTERS = ("version", "_float_tensor")  # last parts of names of what is no weight
OLD_NORMS = {
    "encoder": {"0": "self_attn_layer_norm", "1": "final_layer_norm"},
    "decoder": {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"},
}


def read(folder: Path) -> Conversion:
    """Convert a checkpoint of fairseq.

    Args:
        folder (`Path`): Folder with one `.pt` and the dictionaries of both languages. BPE codes, `bpecodes` or `code`,
            are kept if they are there.

    Raises:
        ValueError: The model has no equal here, or a file is malformed or holds more than weights. The message names
            file and field.
        OSError: A file is missing.
    """
    paths = sorted(folder.glob("*.pt"))
    if len(paths) != 1:
        raise ValueError(f"{folder}: expected one .pt, found {', '.join(path.name for path in paths) or 'none'}.")
    path = paths[0]
    with one_line_errors(path), torch.serialization.safe_globals([Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("args"), Namespace) or "model" not in content:
        raise ValueError(
            f"{path}: expected args and model, as in checkpoints of fairseq before 1.0. Convert others to FSMT first, "
            "for which transformers 4 has a script."
        )
    settings = vars(content["args"])
    check_fields(path, settings, FIXED)
    with one_line_errors(path):
        check_equal(path, settings, SAME_IN_BOTH_STACKS)
        fsmt = _to_fsmt(settings, renamed(content["model"]))
    names = ("source_lang", "target_lang")
    langs = [str(settings.get(name)) for name in names]
    vocabularies = {
        f"vocab-{side}": _read_dictionary(folder / f"dict.{lang}.txt", size)
        for side, lang, size in zip(("src", "tgt"), langs, (fsmt.config.src_vocab_size, fsmt.config.tgt_vocab_size))
    }
    files = tokenizer_files(folder, "FSMTTokenizer", {"langs": langs}, **vocabularies)
    files |= {name: (folder / name).read_bytes() for name in CODES if (folder / name).is_file()}
    return Conversion(from_fsmt(fsmt), fsmt, files)


def renamed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of fairseq, old ones included, under FSMT's names. Old ones join queries, keys and values in one matrix,
    and number the normalisations of a layer."""
    result = {}
    for name, weight in weights.items():
        if name.endswith(COUNTERS):
            continue
        for number, norm in OLD_NORMS.get(name.partition(".")[0], {}).items():
            name = name.replace(f".layer_norms.{number}.", f".{norm}.")
        name = "decoder.output_projection.weight" if name == "decoder.embed_out" else name
        joined = re.fullmatch(r"(.*)\.in_proj_(weight|bias)", name)
        if joined is None:
            result[f"model.{name}"] = weight.float()
            continue
        for projection, part in zip(("q_proj", "k_proj", "v_proj"), weight.float().chunk(3)):
            result[f"model.{joined[1]}.{projection}.{joined[2]}"] = part
    tied = "model.decoder.embed_tokens.weight"
    if tied in result:
        result.setdefault("model.decoder.output_projection.weight", result[tied])
    return result


def _to_fsmt(settings: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> FSMTForConditionalGeneration:
    embeddings = [weights.get(f"model.{stack}.embed_tokens.weight") for stack in ("encoder", "decoder")]
    if any(embedding is None for embedding in embeddings):
        raise ValueError("encoder.embed_tokens.weight, decoder.embed_tokens.weight: expected both embeddings.")
    config = FSMTConfig(
        src_vocab_size=len(embeddings[0]),
        tgt_vocab_size=len(embeddings[1]),
        d_model=settings["encoder_embed_dim"],
        activation_function=settings.get("activation_fn", "relu"),
        max_position_embeddings=settings.get("max_source_positions", 1024),
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.0),
        activation_dropout=settings.get("activation_dropout", 0.0),
        tie_word_embeddings=False,  # `from_fsmt` compares the matrices
        **{f"{stack}_layers": settings[f"{stack}_layers"] for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": settings[f"{stack}_ffn_embed_dim"] for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": settings[f"{stack}_attention_heads"] for stack in ("encoder", "decoder")},
    )
    fsmt = FSMTForConditionalGeneration(config)
    positions = {name: weight for name, weight in fsmt.named_parameters() if "embed_positions" in name}
    load_exactly(fsmt, {**weights, **positions})
    return fsmt.eval()


def _read_dictionary(path: Path, size: int) -> dict[str, int]:
    """Ids of tokens, in the form of FSMT's tokenizer, where the last token of a word ends in `</w>`.

    Raises:
        ValueError: A line is not a token and a number, or there are more tokens than embeddings.
    """
    ids = {token: number for number, token in enumerate(SPECIAL)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        token, _, count = line.rpartition(" ")
        if not token or not count.isdigit():
            raise ValueError(f"{path}, line {number}: expected a token and a number, found {line!r}.")
        ids[token.removesuffix("@@") if token.endswith("@@") else f"{token}</w>"] = len(ids)
    if len(ids) > size:
        raise ValueError(f"{path}: expected at most {size} tokens, as there are embeddings, found {len(ids)}.")
    return ids
