import json
import os
from pathlib import Path

import pytest
import torch
from transformers import FSMTForConditionalGeneration

from support.fairseq_files import settings_of, weights_of
from support.foreign_models import fsmt_model, padded_batch, relative_difference
from training.conversion.fairseq import read


def write_folder(folder: Path, fsmt: FSMTForConditionalGeneration, old: bool = False, **changes) -> None:
    torch.save({"args": settings_of(fsmt, **changes), "model": weights_of(fsmt, old)}, folder / "model.pt")
    for lang, size in (("en", fsmt.config.src_vocab_size), ("de", fsmt.config.tgt_vocab_size)):
        lines = [f"{lang}{number}{'@@' if number % 2 else ''} {900 - number}\n" for number in range(size - 4)]
        (folder / f"dict.{lang}.txt").write_text("".join(lines))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("options", [{}, {"source_vocab_size": 75}, {"tied": False}])
def test_logits_are_fsmts(options, old, tmp_path):
    fsmt = fsmt_model(**options)
    write_folder(tmp_path, fsmt, old)
    conversion = read(tmp_path)
    batch = padded_batch(1, fsmt.config.src_vocab_size)
    assert relative_difference(fsmt, conversion.model, batch) < 1e-5
    assert relative_difference(fsmt, conversion.reference, batch) < 1e-5
    ids = json.loads(conversion.tokenizer_files["vocab-src.json"])
    assert list(ids)[:6] == ["<s>", "<pad>", "</s>", "<unk>", "en0</w>", "en1"]
    assert len(ids) == fsmt.config.src_vocab_size


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_not_run(tmp_path):
    write_folder(tmp_path, fsmt_model())
    torch.save({"args": Bomb(tmp_path / "ran"), "model": {}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_fairseq_1_is_referred_to_fsmt(tmp_path):
    torch.save({"args": None, "cfg": {"model": {}}, "model": {}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt: expected args and model.* FSMT"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_normalize_before": True}, "encoder_normalize_before False only, found True"),
        ({"decoder_learned_pos": True}, "decoder_learned_pos False only, found True"),
        ({"decoder_attention_heads": 8}, "decoder_attention_heads: expected the same in both, found 4 and 8"),
        (
            {"encoder_ffn_embed_dim": 48, "decoder_ffn_embed_dim": 48},
            r"fc1\.weight: expected shape \[48, 64\], found \[96, 64\]",
        ),
        ({"encoder_layers": 3}, r"weights missing: model\.encoder\.layers\.2\."),
    ],
)
def test_what_does_not_map_is_named(changes, message, tmp_path):
    write_folder(tmp_path, fsmt_model(), **changes)
    with pytest.raises(ValueError, match=rf"model\.pt: .*{message}"):
        read(tmp_path)


def test_a_line_of_a_dictionary_that_is_none_is_named(tmp_path):
    write_folder(tmp_path, fsmt_model())
    with open(tmp_path / "dict.de.txt", "a") as file:
        file.write("word\n")
    with pytest.raises(ValueError, match=r"dict\.de\.txt, line 57: expected a token and a number, found 'word'"):
        read(tmp_path)
