"""SentencePiece models, and the folders of Marian's tokenizers with them."""

import json
import random
from pathlib import Path

import sentencepiece


CODES = [">>deu<<", ">>rus<<"]


def train(path: Path, lines: list[str], vocab_size: int, **options) -> list[str]:
    """Train a SentencePiece model, and return its pieces."""
    options = {"hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2, **options}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=vocab_size, **options
        )
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(len(model)) if not model.is_control(i) and not model.is_unknown(i)]


def vocabulary(pieces: list[str]) -> dict[str, int]:
    """Ids in an order that is not SentencePiece's, as Marian's vocabulary has them."""
    pieces = sorted(set(pieces))
    random.Random(0).shuffle(pieces)
    return {token: i for i, token in enumerate(["</s>", "<unk>", *CODES, *pieces, "<pad>"])}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_marian(folder: Path, sources: list[str], targets: list[str], vocab_size: int = 300, **options) -> Path:
    source = train(folder / "source.spm", sources, vocab_size, **options)
    target = train(folder / "target.spm", targets, vocab_size)
    write_json(folder / "vocab.json", vocabulary([*source, *target]))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", "model_max_length": 512})
    return folder
