"""Files of another toolkit's tokenizer, kept beside converted weights."""

import json
from pathlib import Path

from ..inference.checkpoint_files import TOKENIZER_CONFIG, TOKENIZER_FILES, read_object


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
