"""BPE codes of FSMT and fairseq through `convert`; the oracle is a segmentation as subword-nmt describes it, and
FSMTTokenizer for text."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, FSMTForConditionalGeneration, FSMTTokenizer

from hf_vaswani import VaswaniForConditionalGeneration
from support.fairseq_files import MERGES, TOKENS, settings_of, weights_of, write_fsmt
from support.foreign_models import fsmt_model
from training.cli import main
from training.conversion.tokenizers import read_codes
from training.inference.loading import load_tokenizer


pytest.importorskip("sacremoses", reason="sacremoses is in the extra dev")

LINES = ["low lower newer now", "new lower", "wow ; xenon low", "o l e", "newest , &apos;lower&apos; !"]
CODES = {
    "fastBPE": "".join(f"{merge} 9\n" for merge in MERGES),
    "subword-nmt": "\n".join(["#version: 0.2", *MERGES, ""]),
}


def subwords(word: str) -> list[str]:
    """A word in the notation of fairseq's dictionaries, `new@@ er`: the first merge of the list comes first."""
    parts, ranks = [*word[:-1], f"{word[-1]}</w>"], {tuple(merge.split()): rank for rank, merge in enumerate(MERGES)}
    while found := [(ranks[p], i) for i, p in enumerate(pairwise(parts)) if p in ranks]:
        _, place = min(found)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    return [*(f"{part}@@" for part in parts[:-1]), parts[-1].removesuffix("</w>")]


def write_fairseq(folder: Path, fsmt: FSMTForConditionalGeneration, codes: str | None, name: str = "bpecodes") -> None:
    """A model with a dictionary a language; that of German has another order, and lacks a token."""
    folder.mkdir()
    torch.save({"args": settings_of(fsmt), "model": weights_of(fsmt)}, folder / "model.pt")
    for language, tokens in dictionaries().items():
        (folder / f"dict.{language}.txt").write_text("".join(f"{token} 5\n" for token in tokens), encoding="utf-8")
    if codes is not None:
        (folder / name).write_text(codes, encoding="utf-8")


def dictionaries() -> dict[str, list[str]]:
    tokens = [token.removesuffix("</w>") if token.endswith("</w>") else f"{token}@@" for token in TOKENS[4:]]
    fill = [f"madeupword{number:04}" for number in range(60 - 4 - len(tokens))]
    return {"en": [*tokens, *fill], "de": [*fill[:-1], *(t for t in reversed(tokens) if t != "er")]}


def ids_of(line: str, language: str) -> list[int]:
    """What fairseq reads: `<unk>` is 3, `</s>` is 2, and the dictionary begins at 4."""
    ids = {token: number for number, token in enumerate(dictionaries()[language], start=4)}
    return [*(ids.get(part, 3) for word in line.split() for part in subwords(word)), 2]


@pytest.mark.parametrize(("kind", "name"), [("fastBPE", "bpecodes"), ("subword-nmt", "code")])
def test_codes_of_fairseq_segment_tokenised_text(kind, name, tmp_path, capsys):
    fsmt = fsmt_model(source_vocab_size=60)
    write_fairseq(tmp_path / "fairseq", fsmt, CODES[kind], name)
    assert main(["convert", str(tmp_path / "fairseq"), str(tmp_path / "ours")]) == 0
    printed = capsys.readouterr().out
    assert "Tokenizer converted" in printed and "checked on text" in printed
    [moses] = [line for line in printed.splitlines() if "Moses" in line]
    assert "sacremoses" in moses
    tokenizer = load_tokenizer(tmp_path / "ours")
    record = json.loads((tmp_path / "ours" / "converted_from.json").read_text(encoding="utf-8"))
    assert "(sacremoses): ids of the given texts: 8 of 8 equal" in record["tokenizer"]

    weights = fsmt.model.encoder.embed_tokens.weight
    ours = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "ours").model.encoder.embed_tokens.weight
    assert [ids_of(line, "de") for line in LINES] == tokenizer(text_target=LINES)["input_ids"]
    for line in LINES:
        assert torch.equal(ours[tokenizer(line)["input_ids"]], weights[ids_of(line, "en")]), line
    assert any(3 in ids_of(line, "de") and 3 not in ids_of(line, "en") for line in LINES)
    kept = "low now newer"
    assert tokenizer.decode([i for i in ids_of(kept, "de") if i != 3], skip_special_tokens=True) == "low now newer"


def test_translations_are_fsmts(tmp_path, capsys):
    """The source is tokenised by Moses before, and the translation detokenised after."""
    folder, fsmt = tmp_path / "fsmt", fsmt_model(source_vocab_size=len(TOKENS) + 2)
    fsmt.generation_config.update(no_repeat_ngram_size=1, suppress_tokens=[0, 1, 3], max_length=20)
    fsmt.save_pretrained(folder)
    write_fsmt(
        folder, [*TOKENS, ",</w>", "!</w>"], [*TOKENS[:4], *reversed(TOKENS[4:]), *(f"{w}</w>" for w in range(40))]
    )
    text = "newest, lower now!"
    original = FSMTTokenizer.from_pretrained(folder)
    generated = fsmt.generate(**original(text, return_tensors="pt"))
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    (tmp_path / "in").write_text(" ".join(original.moses_tokenize(text, "en")) + "\n", encoding="utf-8")
    words = ["translate", "--model", str(tmp_path / "ours"), "--input", str(tmp_path / "in")]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    translated = (tmp_path / "out").read_text(encoding="utf-8").split()
    expected = original.decode(generated[0], skip_special_tokens=True)
    assert original.moses_detokenize(translated, "de") == expected
    assert len(set(translated)) > 5


def test_the_originals_stay_usable_where_codes_are_of_another_kind(tmp_path, capsys):
    """In the first version of subword-nmt's codes, the end of a word is a token of its own."""
    write_fairseq(tmp_path / "fairseq", fsmt_model(source_vocab_size=60), "l o\nlo w\nw </w>\n")
    assert main(["convert", str(tmp_path / "fairseq"), str(tmp_path / "ours")]) == 0
    printed = capsys.readouterr().out
    assert "kept as it is: bpecodes, line 3" in printed and "version 0.2" in printed
    assert (tmp_path / "ours" / "bpecodes").read_text() == "l o\nlo w\nw </w>\n"


def test_the_originals_stay_usable_where_the_comparison_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FSMTTokenizer, "bpe", lambda self, word: " ".join([*word[:-1], f"{word[-1]}</w>"]))
    write_fairseq(tmp_path / "fairseq", fsmt_model(source_vocab_size=60), CODES["subword-nmt"])
    assert main(["convert", str(tmp_path / "fairseq"), str(tmp_path / "ours")]) == 0
    printed = capsys.readouterr().out
    assert "kept as it is" in printed and "first difference" in printed
    kept = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert isinstance(kept, FSMTTokenizer)
    monkeypatch.undo()
    assert kept("low lower newer now")["input_ids"] == ids_of("low lower newer now", "en")


def test_a_vocabulary_without_codes_is_said_to_read_no_text(tmp_path, capsys):
    write_fairseq(tmp_path / "fairseq", fsmt_model(source_vocab_size=60), None)
    assert main(["convert", str(tmp_path / "fairseq"), str(tmp_path / "ours")]) == 0
    printed = capsys.readouterr().out
    assert "found vocab-src.json, but no merges.txt, bpecodes or code" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("l o\nlow\n", "line 2: .* found 'low'"),
        ("#version: 0.2\nl o\n\n", "line 3: .* found ''"),
        ("l o x\n", "line 1: .* found 'l o x'"),
        ("l o 3 4\n", "line 1: .* found 'l o 3 4'"),
        ("e </w>\n", "line 1: found the token '</w>'"),
    ],
)
def test_a_malformed_line_is_named(text, message):
    with pytest.raises(ValueError, match=f"^codes, {message}"):
        read_codes(text, "codes")


def test_both_forms_of_codes_are_read():
    expected = [tuple(merge.split()) for merge in MERGES]
    assert [read_codes(text, "codes") for text in CODES.values()] == [expected, expected]
