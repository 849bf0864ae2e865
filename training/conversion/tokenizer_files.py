"""Tokenizers of other toolkits: a fast one in their place, or their files, kept beside converted weights."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..inference.checkpoint_files import TOKENIZER_CONFIG, TOKENIZER_FILES, read_object
from .agreement import SENTENCES
from .tokenizers import TokenizerReport, convert_tokenizer


CONVERTIBLE = ("source.spm", "merges.txt")  # each in the folders of one kind of tokenizer

ORIGINALS = (
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "merges.txt",
    "vocab-src.json",
    "vocab-tgt.json",
)


def tokenizer_files(folder: Path, tokenizer_class: str, **vocabularies: dict[str, int]) -> dict[str, bytes]:
    """Contents of the tokenizer's files in a checkpoint, by name.

    `tokenizer_config.json` gets the name of the tokenizer's class, which `AutoTokenizer` cannot tell from a Vaswani
    model. A checkpoint without a tokenizer has none.

    Args:
        folder (`Path`): The checkpoint.
        tokenizer_class (`str`): Class of transformers that reads the files.
        **vocabularies: Ids by token that the checkpoint has in another form, to write as `NAME.json`.
    """
    names = [name for name in (*TOKENIZER_FILES, *ORIGINALS) if (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    for name, ids in vocabularies.items():
        files[f"{name}.json"] = json.dumps(ids, indent=2, ensure_ascii=False).encode("utf-8")
    if not files:
        return {}
    settings = read_object(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
    settings = {"tokenizer_class": tokenizer_class, **settings}
    return {**files, TOKENIZER_CONFIG: json.dumps(settings, indent=2, ensure_ascii=False).encode("utf-8")}


def one_fast_tokenizer(folder: Path) -> tuple[PreTrainedTokenizerFast | None, TokenizerReport | None, str]:
    """Convert the tokenizer of a checkpoint to one that needs no other package.

    Returns:
        The tokenizer and its report, or `None` for both if the original's files have to be kept; and what was found.
    """
    if not any((folder / name).is_file() for name in CONVERTIBLE):
        return None, None, "kept as it is"
    try:
        tokenizer, report = convert_tokenizer(folder, SENTENCES, SENTENCES, own_source_rows=True)
    except (ImportError, ValueError) as error:
        return None, None, f"kept as it is: {error}"
    found = f"{report.lines}; {report.hard_strings}; {report.decoded}"
    if report.lines.different or report.decoded.different:
        return None, None, f"kept as it is: {found}"
    sides = [folder / f"{side}.spm" for side in ("source", "target")]
    if all(path.is_file() for path in sides) and sides[0].read_bytes() != sides[1].read_bytes():
        found += "; given translations are segmented by source.spm too"
    return tokenizer, report, f"converted: {found}"


@torch.no_grad()
def with_source_rows(model: VaswaniForConditionalGeneration, rows: list[int]) -> VaswaniForConditionalGeneration:
    """The same model for a tokenizer whose source tokens are other ones.

    Args:
        model (`VaswaniForConditionalGeneration`): Model of the original tokenizer.
        rows (`list[int]`): The original source token for each token of the new one.
    """
    weights = {**model.state_dict()}
    weights["model.encoder.embed_tokens.weight"] = weights["model.encoder.embed_tokens.weight"][rows]
    config = VaswaniConfig(**{**model.config.to_diff_dict(), "source_vocab_size": len(rows)})
    converted = VaswaniForConditionalGeneration(config)
    converted.load_state_dict(weights)
    converted.generation_config = model.generation_config
    return converted.eval()
