"""Tokenizers of MarianMT and FSMT, converted; the oracles are SentencePiece and transformers' slow tokenizers."""

import gzip
import json
import os
import random
import sys
import unicodedata
from itertools import chain
from pathlib import Path

import pytest
from transformers import AutoTokenizer, MarianTokenizer

from support.fairseq_files import TOKENS, write_fsmt
from support.sentencepiece_models import CODES, vocabulary, write_json, write_marian
from training.conversion.tokenizers import HARD_STRINGS, convert_tokenizer
from training.demo_data import generate_pairs


sentencepiece = pytest.importorskip("sentencepiece", reason="SentencePiece is in the extra dev")

RUSSIAN = ["старик даёт ребёнку книгу", "девочка видит дом и поёт", "собака спит, а кошка ест"]
PAIRS = generate_pairs(1000)
ENGLISH, GERMAN = zip(*PAIRS)
WORDS = [
    *ENGLISH[0].split(),
    "über",
    "Straße",
    "дом",
    "книгу",
    "поёт",
    "ё",
    "漢字",
    "かな",
    "안녕",
    "שלום",
    "नमस्ते",
    "👍",
    "½",
    "ﬁ",
]


@pytest.fixture(scope="module")
def marian(tmp_path_factory) -> Path:
    """From English, with some characters that NFC composes; and into German and Russian, which source.spm lacks."""
    sources = [*ENGLISH, *["Tiếng Việt rất đẹp ữ ờ", "한국 カタカナ ガギ パ が ぱ び", "café Äpfel ñ"] * 30]
    return write_marian(tmp_path_factory.mktemp("marian"), sources, [*GERMAN, *RUSSIAN * 50], 400)


@pytest.fixture(scope="module")
def original(marian) -> MarianTokenizer:
    return MarianTokenizer.from_pretrained(marian)


@pytest.fixture(scope="module")
def converted(marian):
    tokenizer, _ = convert_tokenizer(marian)
    return tokenizer


def random_texts(count: int) -> list[str]:
    """Words of many scripts with no, one or several spaces between them, composed or not."""
    rng = random.Random(0)
    texts = ("".join(rng.choice(WORDS) + rng.choice(["", " ", "  ", "\t"]) for _ in range(6)) for _ in range(count))
    return [unicodedata.normalize(rng.choice(["NFC", "NFD"]), text) for text in texts]


def same_ids(original, converted, texts) -> None:
    expected = original(texts, split_special_tokens=True).input_ids
    different = [row for row in zip(texts, expected, converted(texts).input_ids) if row[1] != row[2]]
    assert different == []


def test_ids_equal_sentencepieces(original, converted):
    same_ids(original, converted, [*ENGLISH[:300], *GERMAN[:300], *RUSSIAN, *random_texts(1000), *HARD_STRINGS])


def test_decoded_text_equals_sentencepieces(original, converted):
    targets = original(text_target=[*GERMAN[:300], *RUSSIAN, *HARD_STRINGS], split_special_tokens=True).input_ids
    targets += [[i] for i in range(len(original))]
    expected, found = (t.batch_decode(targets, skip_special_tokens=True) for t in (original, converted))
    assert found == expected
    assert found[0] == GERMAN[0]


def test_translations_are_encoded_by_the_model_of_the_target_language(marian, original):
    texts = [*GERMAN[:300], *RUSSIAN, *HARD_STRINGS]
    converted, report = convert_tokenizer(marian, targets=texts, side="target")
    expected = original(text_target=texts, split_special_tokens=True).input_ids
    assert converted(texts).input_ids == expected
    assert original(texts, split_special_tokens=True).input_ids != expected
    assert report.equal and report.lines.compared == len(texts)


def test_characters_unknown_to_the_source_are_looked_up_as_a_whole_run(original, converted):
    ids = original.get_vocab()
    run = next(token for token in ids if len(token) > 1 and all("а" <= c <= "я" for c in token))
    assert converted(f"a{run}b").input_ids == original(f"a{run}b").input_ids
    assert ids[run] in converted(f"a{run}b").input_ids
    assert converted(f"a{run}{run}b").input_ids == original(f"a{run}{run}b").input_ids
    assert ids[run] not in converted(f"a{run}{run}b").input_ids


def test_special_tokens_end_and_pad_a_text_and_are_plain_text_inside(marian, converted):
    ids = json.loads((marian / "vocab.json").read_text(encoding="utf-8"))
    batch = converted(["the old man sees the dog", "the"], padding=True)
    assert batch["input_ids"][0][-1] == ids["</s>"] == converted.eos_token_id
    assert batch["input_ids"][1][-1] == ids["<pad>"] == converted.pad_token_id
    assert "token_type_ids" not in batch
    assert converted("</s> <pad>").input_ids.count(ids["</s>"]) == 1
    assert ids["<pad>"] not in converted("</s> <pad>").input_ids
    assert len(converted) == len(ids)
    assert {**converted.get_vocab(), **ids} == converted.get_vocab() | ids
    assert converted.convert_tokens_to_ids(["<unk>", *CODES]) == [1, 2, 3]


def test_language_codes_begin_a_text(original, converted):
    texts = [f"{code}{text}" for code in CODES for text in (" the man", "the man", "")]
    same_ids(original, converted, texts)
    assert converted(texts).input_ids[0][0] == 2


def test_known_differences(original, converted):
    inside, unknown, order = "the >>deu<< man", ">>xyz<< the man", "e\u0301\u0323"
    assert 2 in converted(inside).input_ids and 2 not in original(inside).input_ids
    assert original(unknown).input_ids[:1] == [1] != converted(unknown).input_ids[:1]
    assert converted.backend_tokenizer.normalizer.normalize_str(order).replace(" ", "") == "▁ẹ\u0301"
    assert original.spm_source.normalize(order) == "▁é\u0323"


def test_the_saved_tokenizer_needs_no_sentencepiece(converted, tmp_path, monkeypatch):
    converted.save_pretrained(tmp_path)
    for module in [name for name in sys.modules if name.split(".")[0] == "sentencepiece"]:
        monkeypatch.setitem(sys.modules, module, None)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*ENGLISH[:50], *RUSSIAN, *HARD_STRINGS, ">>deu<< the man", "</s>"]
    assert loaded(texts).input_ids == converted(texts).input_ids
    assert loaded.batch_decode(loaded(texts).input_ids) == converted.batch_decode(converted(texts).input_ids)
    assert loaded.model_max_length == 512


def test_the_report_counts_differences_and_shows_the_first(marian):
    texts = [ENGLISH[0], "the >>deu<< man", ">>xyz<< the man"]
    _, report = convert_tokenizer(marian, texts, GERMAN[:5])
    assert (report.lines.compared, report.lines.different, report.lines.first.given) == (3, 2, texts[1])
    assert 2 in report.lines.first.found and 2 not in report.lines.first.expected
    assert (report.hard_strings.compared, report.hard_strings.different) == (len(HARD_STRINGS), 0)
    size = len(json.loads((marian / "vocab.json").read_text(encoding="utf-8")))
    assert (report.decoded.compared, report.decoded.different) == (size + 5, 0)
    assert not report.equal
    assert "1 of 3" in str(report.lines) and texts[1] in str(report.lines)


@pytest.mark.parametrize("normalization", ["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"])
def test_normalisations_of_sentencepiece(tmp_path, normalization):
    folder = write_marian(tmp_path, ENGLISH, GERMAN, normalization_rule_name=normalization)
    converted, report = convert_tokenizer(folder)
    original = MarianTokenizer.from_pretrained(folder)
    texts = [*ENGLISH[:100], *random_texts(500), *HARD_STRINGS]
    same_ids(original, converted, texts)
    normalize = converted.backend_tokenizer.normalizer.normalize_str
    # Spaces only separate characters that the model does not know.
    different = [text for text in texts if normalize(text).replace(" ", "") != original.spm_source.normalize(text)]
    assert different == []
    assert report.equal


def test_a_source_language_without_latin_letters(tmp_path):
    folder = write_marian(tmp_path, RUSSIAN * 50, ENGLISH, 60)
    converted, report = convert_tokenizer(folder, RUSSIAN, ENGLISH[:50])
    assert (report.lines.different, report.decoded.different) == (0, 0)
    assert converted.convert_tokens_to_ids(["</s>", "<unk>", *CODES]) == [0, 1, 2, 3]
    assert len(converted) == converted.pad_token_id + 1
    ordinary = [text for text in HARD_STRINGS if "<" not in text]
    same_ids(
        MarianTokenizer.from_pretrained(folder), converted, [*random_texts(300), *ordinary, ">>deu<< дом", "a</s>b"]
    )
    assert converted("</s> <pad>").input_ids.count(converted.eos_token_id) == 1
    assert converted.pad_token_id not in converted("</s> <pad>").input_ids


def test_pieces_of_words_across_spaces(tmp_path):
    folder = write_marian(tmp_path, ENGLISH, GERMAN, split_by_whitespace=False)
    converted, _ = convert_tokenizer(folder)
    assert any("▁" in token[1:] for token in json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    same_ids(MarianTokenizer.from_pretrained(folder), converted, [*ENGLISH[:100], *random_texts(300), *HARD_STRINGS])


def test_pieces_without_an_id_need_rows_of_their_own(tmp_path):
    folder = write_marian(tmp_path, ENGLISH, GERMAN)
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    piece, last = "▁the", len(ids) - 2
    renumbered = {token: i for i, token in enumerate(token for token in ids if token != piece)}
    write_json(folder / "vocab.json", renumbered)
    with pytest.raises(ValueError, match=r"source\.spm: .*found 1 .*'▁the'"):
        convert_tokenizer(folder)
    converted, report = convert_tokenizer(folder, ENGLISH[:100], GERMAN[:100], own_rows=True)
    assert report.equal
    assert report.rows == [*range(last + 1), renumbered["<unk>"]]
    expected = MarianTokenizer.from_pretrained(folder)(list(ENGLISH[:100])).input_ids
    found = converted(list(ENGLISH[:100])).input_ids
    assert [[report.rows[i] for i in line] for line in found] == expected != found


def test_separate_vocabularies_need_rows_of_their_own(tmp_path):
    folder = write_marian(tmp_path, ENGLISH, GERMAN)
    for name, file in (("source", "vocab.json"), ("target", "target_vocab.json")):
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        ids = vocabulary([model.id_to_piece(i) for i in range(3, len(model))])
        last = next(token for token, i in ids.items() if i == 4)
        write_json(folder / file, {**ids, "<pad>": 4, last: ids["<pad>"]})
    write_json(folder / "tokenizer_config.json", {"separate_vocabs": True})
    with pytest.raises(ValueError, match="expected one vocabulary"):
        convert_tokenizer(folder)
    converted, report = convert_tokenizer(folder, ENGLISH[:100], GERMAN[:100], own_rows=True)
    assert report.equal
    original = MarianTokenizer.from_pretrained(folder)
    found = converted(list(ENGLISH[:100])).input_ids
    assert [[report.rows[i] for i in line] for line in found] == original(list(ENGLISH[:100])).input_ids
    targets = original(text_target=list(GERMAN[:100])).input_ids
    assert converted.batch_decode(targets, skip_special_tokens=True) == list(GERMAN[:100])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_type": "bpe"}, "type BPE"),
        ({"byte_fallback": True}, "byte fallback"),
        ({"add_dummy_prefix": False}, "no dummy prefix"),
        ({"remove_extra_whitespaces": False}, "spaces that are not collapsed"),
        ({"treat_whitespace_as_suffix": True}, "spaces at the end of words"),
        ({"user_defined_symbols": ["<x>"]}, "'<x>'"),
    ],
)
def test_features_that_cannot_be_converted_are_named(tmp_path, options, named):
    folder = write_marian(tmp_path, ENGLISH, GERMAN, **options)
    with pytest.raises(ValueError, match=named) as error:
        convert_tokenizer(folder)
    assert str(folder / "source.spm") in str(error.value)


def test_a_table_of_characters_of_ones_own_is_refused(tmp_path):
    (tmp_path / "rules.tsv").write_text("61\t62\n", encoding="utf-8")  # a -> b
    folder = write_marian(tmp_path, ENGLISH, GERMAN, normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    with pytest.raises(ValueError, match=r"source\.spm: .*normalisation 'user_defined'"):
        convert_tokenizer(folder)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
def test_missing_files_are_named(marian, tmp_path, name):
    for file in marian.iterdir():
        if file.name != name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="no such file") as error:
        convert_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda ids: ids.update({"<other>": ids.pop("<unk>")}), "<unk>"),
        (lambda ids: ids.update({"<other>": ids.pop("<pad>")}), "<pad>"),
        (lambda ids: ids.pop("<unk>"), "id 1"),
        (lambda ids: ids.update({"</s>": len(ids)}), "id 0"),
        (lambda ids: ids.update({"</s>": "0"}), "id 0"),
        (lambda ids: ids.update({"<pad>": ids["<unk>"]}), "id"),
    ],
)
def test_damaged_vocabularies_are_named(marian, tmp_path, change, named):
    for file in marian.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ids = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    change(ids)
    write_json(tmp_path / "vocab.json", ids)
    with pytest.raises(ValueError, match=named) as error:
        convert_tokenizer(tmp_path)
    assert str(tmp_path / "vocab.json") in str(error.value)


def test_a_file_that_is_no_model_is_named(marian, tmp_path):
    for file in marian.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "source.spm").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"source\.spm: not a SentencePiece model"):
        convert_tokenizer(tmp_path)


def test_a_missing_sentencepiece_is_named(marian, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"hf-vaswani\[convert\]"):
        convert_tokenizer(marian)


def test_bpe_codes_segment_words_between_spaces(tmp_path):
    pytest.importorskip("sacremoses", reason="sacremoses is in the extra dev")
    converted, report = convert_tokenizer(write_fsmt(tmp_path), ["low lower newer now", "x"], ["newer low"])
    names = ["low</w>", "low", "er</w>", "newer</w>", "n", "o", "w</w>", "<unk>", "</s>"]
    assert converted.convert_ids_to_tokens(converted("low lower newer now xq").input_ids) == [*names[:8], *names[7:]]
    assert (
        converted.decode(converted("low lower  newer now").input_ids, skip_special_tokens=True)
        == "low lower newer now"
    )
    assert (converted.pad_token_id, converted.bos_token_id, converted.eos_token_id) == (1, 0, 2)
    assert report.equal and report.rows is None


def test_bpe_codes_with_tokens_without_an_id_need_rows_of_their_own(tmp_path):
    pytest.importorskip("sacremoses", reason="sacremoses is in the extra dev")
    source = [token for token in TOKENS if token != "low</w>"]
    folder = write_fsmt(tmp_path, source, source)
    with pytest.raises(ValueError, match=r"merges\.txt: .*found 1 .*'low</w>'"):
        convert_tokenizer(folder)
    converted, report = convert_tokenizer(folder, ["low lower"], ["newer"], own_rows=True)
    assert report.equal
    rows = [report.rows[i] for i in converted("low lower").input_ids]
    assert [source[row] for row in rows] == ["<unk>", "low", "er</w>", "</s>"]


def test_bpe_codes_with_separate_vocabularies_need_rows_of_their_own(tmp_path):
    pytest.importorskip("sacremoses", reason="sacremoses is in the extra dev")
    target = [*TOKENS[:4], *reversed(TOKENS[4:])]
    folder = write_fsmt(tmp_path, TOKENS, target)
    with pytest.raises(ValueError, match="expected one vocabulary"):
        convert_tokenizer(folder)
    converted, report = convert_tokenizer(folder, ["low lower"], ["newer low"], own_rows=True)
    assert report.equal
    rows = [report.rows[i] for i in converted("low lower").input_ids]
    assert [TOKENS[row] for row in rows] == ["low</w>", "low", "er</w>", "</s>"]
    assert converted.decode([target.index("newer</w>"), target.index("low</w>")]) == "newer low"


def test_a_missing_sacremoses_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(ImportError, match=r"hf-vaswani\[convert\]"):
        convert_tokenizer(write_fsmt(tmp_path))


@pytest.mark.slow
def test_ids_and_text_of_ten_thousand_real_lines(tmp_path):
    folder = os.environ.get("TATOEBA")
    if folder is None:
        pytest.skip("TATOEBA does not name the folder of Tatoeba En-De")
    texts = {}
    for language in ("en", "de"):
        with gzip.open(Path(folder) / f"train.{language}.gz", "rt", encoding="utf-8") as file:
            texts[language] = file.read().splitlines()[:50_000]
    marian = write_marian(tmp_path, texts["en"], texts["de"], 8000, character_coverage=0.9995)
    lines = [*texts["en"][-5000:], *texts["de"][-5000:]]
    lines += [unicodedata.normalize("NFD", line) for line in texts["de"][-1000:]]
    converted, report = convert_tokenizer(marian, lines, texts["de"][-10_000:])
    assert report.equal and report.lines.compared == 11_000 and report.decoded.compared > 20_000
    same_ids(MarianTokenizer.from_pretrained(marian), converted, lines)
    assert len(set(chain(*converted(lines).input_ids))) > 4000
