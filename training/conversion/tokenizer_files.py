"""Tokenizers of other toolkits: a fast one in their place, or their files, kept beside converted weights."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..data.two_sided_tokenizer import TARGET_TOKENIZER
from ..inference.checkpoint_files import TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES, one_line_errors, read_object
from .agreement import SENTENCES
from .tokenizers import convert_tokenizer, read_codes, with_target_side


MERGES = "merges.txt"
CONVERTIBLE = ("source.spm", MERGES)  # each in the folders of one kind of tokenizer
CODES = ("bpecodes", "code")  # of fairseq, as its own loader names them
# Vocabularies, and what segments text for them.
SEGMENTATIONS = {
    "vocab.json": "source.spm and target.spm",
    "vocab-src.json": f"{MERGES}, {' or '.join(CODES)}",
}

ORIGINALS = (
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    MERGES,
    "vocab-src.json",
    "vocab-tgt.json",
)


def tokenizer_files(
    folder: Path, tokenizer_class: str, defaults: dict[str, Any] | None = None, **vocabularies: dict[str, int]
) -> dict[str, bytes]:
    """Contents of the tokenizer's files in a checkpoint, by name.

    `tokenizer_config.json` gets the name of the tokenizer's class, which `AutoTokenizer` cannot tell from a Vaswani
    model. A checkpoint without a tokenizer has none.

    Args:
        folder (`Path`): The checkpoint.
        tokenizer_class (`str`): Class of transformers that reads the files.
        defaults (`dict`, *optional*): Further fields of `tokenizer_config.json`, if it lacks them.
        **vocabularies: Ids by token that the checkpoint has in another form, to write as `NAME.json`.
    """
    names = [name for name in (*TOKENIZER_FILES, *ORIGINALS) if (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    for name, ids in vocabularies.items():
        files[f"{name}.json"] = json.dumps(ids, indent=2, ensure_ascii=False).encode("utf-8")
    if not files:
        return {}
    settings = read_object(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
    settings = {"tokenizer_class": tokenizer_class, **(defaults or {}), **settings}
    return {**files, TOKENIZER_CONFIG: json.dumps(settings, indent=2, ensure_ascii=False).encode("utf-8")}


class TokenizerConversion(NamedTuple):
    """A checkpoint's tokenizer, converted or kept."""

    tokenizer: PreTrainedTokenizerFast | None  # `None` if the files have to be kept
    source_rows: list[int] | None  # see `TokenizerReport`
    files: dict[str, bytes]  # of the original, by name
    outcome: str  # for people


def one_fast_tokenizer(files: dict[str, bytes]) -> TokenizerConversion:
    """Convert the tokenizer of a checkpoint to one that needs no other package, with a target side of its own where
    source and target have different pieces.

    Args:
        files (`dict`): From `tokenizer_files`.
    """
    if not any(name in files for name in (*CONVERTIBLE, *CODES)):
        return TokenizerConversion(None, None, files, _missing(files))
    with TemporaryDirectory() as scratch:
        try:
            files = with_merges(files)
            for name, content in files.items():
                Path(scratch, name).write_bytes(content)
            tokenizer, rows, found, is_equal = _convert(Path(scratch), files)
        except (ImportError, ValueError) as error:
            reason = str(error).replace(f"{scratch}{os.sep}", "").replace(scratch, "tokenizer")
            return TokenizerConversion(None, None, files, f"kept as it is: {reason.removesuffix('.')}")
    if not is_equal:
        return TokenizerConversion(None, None, files, f"kept as it is: {found}")
    kind = ", for sources and translations that are tokenised by Moses' rules (sacremoses)" if MERGES in files else ""
    return TokenizerConversion(tokenizer, rows, files, f"converted{kind}: {found}")


def _missing(files: dict[str, bytes]) -> str:
    """What a vocabulary without a segmentation lacks, if the files are such a one."""
    for vocabulary, segmentation in SEGMENTATIONS.items():
        if vocabulary in files and TOKENIZER not in files:
            return f"kept as it is: it cannot read text: found {vocabulary}, but no {segmentation}"
    return "kept as it is"


def with_merges(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with `merges.txt` of fairseq's BPE codes, in the form that FSMT's tokenizer reads.

    Raises:
        ValueError: The codes are malformed, or of a kind that cannot be converted.
    """
    name = next((name for name in CODES if name in files), None)
    if name is None or MERGES in files:
        return files
    with one_line_errors(name):
        merges = read_codes(files[name].decode("utf-8"), name)
    text = "".join(f"{left} {right}\n" for left, right in merges)
    return {**{other: content for other, content in files.items() if other != name}, MERGES: text.encode("utf-8")}


def _convert(folder: Path, files: dict[str, bytes]) -> tuple[PreTrainedTokenizerFast, list[int] | None, str, bool]:
    """Convert both sides: tokenizer, source rows, what the comparison found, and whether the given texts agree."""
    tokenizer, report = convert_tokenizer(folder, SENTENCES, SENTENCES, own_rows=True)
    found = f"{report.lines}; {report.hard_strings}; {report.decoded}"
    is_equal = not (report.lines.different or report.decoded.different)
    if report.rows is None and files.get("source.spm") == files.get("target.spm"):
        return tokenizer, None, found, is_equal
    target, by_target = convert_tokenizer(folder, SENTENCES, SENTENCES, side="target", own_rows=True)
    found += f"; given translations by {TARGET_TOKENIZER}: {by_target.lines}; {by_target.hard_strings}"
    joined = with_target_side(tokenizer, target, by_target.rows)
    return joined, report.rows, found, is_equal and not by_target.lines.different


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
