import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data.tokenizer import extend_tokenizer, symbol_ids, train_tokenizer, with_symbols


# A fixture would be rebuilt for every example.
SENTENCES = ["the old man sees the dog.", "der alte Mann sieht den Hund.", "Öl, Äpfel und süße Früchte"]
TOKENIZER = train_tokenizer(SENTENCES * 20, vocab_size=320, show_progress=False)


@settings(max_examples=500, deadline=None)
@given(st.text())
@example("")
@example(" ")
@example("  two leading and trailing spaces  ")
@example("</s> <pad> <s>")
@example("\t\n\r\u00a0\u202f\u2028")
@example("Ġ▁ 👩‍👩‍👧 \U0010ffff \x00")
@example("e\u0301 is not \u00e9")
def test_decoding_gives_back_any_text(text):
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_sources_and_targets_end_with_the_end_token():
    encoded = TOKENIZER("the man", text_target="der Mann")
    for ids in (encoded["input_ids"], encoded["labels"]):
        assert ids[-1] == TOKENIZER.eos_token_id
        assert ids.count(TOKENIZER.eos_token_id) == 1


def test_special_tokens_are_the_models_defaults_and_there_is_no_unknown():
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1, 2)
    assert TOKENIZER.unk_token is None


def test_special_tokens_in_a_text_are_text():
    ids = TOKENIZER("a </s> b <pad>").input_ids
    assert ids.index(TOKENIZER.eos_token_id) == len(ids) - 1
    assert TOKENIZER.pad_token_id not in ids


def test_a_word_is_the_same_token_at_the_beginning_and_inside():
    first, *_ = TOKENIZER("man").input_ids
    assert TOKENIZER("the man").input_ids[-2] == first


def test_both_languages_share_the_vocabulary():
    assert len(TOKENIZER) <= 320
    for sentence in ("the old man", "der alte Mann"):
        assert len(TOKENIZER(sentence).input_ids) < len(sentence) / 2


def test_saved_tokenizer_loads_without_code(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    for text in (*SENTENCES, "</s> x", "ñ 漢字"):
        assert loaded(text).input_ids == TOKENIZER(text).input_ids
        assert loaded.decode(loaded(text).input_ids, skip_special_tokens=True) == text


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"at least 259.*got 100"):
        train_tokenizer(SENTENCES, vocab_size=100)


OLD = train_tokenizer(SENTENCES * 20, vocab_size=300, show_progress=False)
NEW_SENTENCES = ["the spectrometer's calibration", "die Kalibrierung des Spektrometers", "Spektrometer 漢字 漢字"]
EXTENDED = extend_tokenizer(OLD, NEW_SENTENCES * 5, [], 25)


def bpe(tokenizer) -> dict:
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]


@pytest.mark.parametrize("start", [259, 300])
def test_extending_goes_on_as_the_library_would_have(start, pairs):
    texts = [text for pair in pairs for text in pair]
    whole, old = (train_tokenizer(texts, vocab_size=size, show_progress=False) for size in (400, start))
    assert (len(old), len(whole)) == (start, 400)
    assert bpe(extend_tokenizer(old, texts, [], 400 - start)) == bpe(whole)


def test_extending_keeps_ids_and_merges_and_adds_behind_them():
    old, new = bpe(OLD), bpe(EXTENDED)
    assert new["merges"][: len(old["merges"])] == old["merges"]
    assert len(new["merges"]) == len(old["merges"]) + 25
    assert {token: new["vocab"][token] for token in old["vocab"]} == old["vocab"]
    assert sorted(new["vocab"].values()) == list(range(325))
    assert len(EXTENDED) == 325
    assert [EXTENDED.decode([i]) for i in range(300)] == [OLD.decode([i]) for i in range(300)]


def test_an_extended_vocabulary_is_shorter_on_the_new_text_and_the_same_on_the_old():
    for sentence in NEW_SENTENCES:
        assert len(EXTENDED(sentence).input_ids) < len(OLD(sentence).input_ids)
    for sentence in ("the old man", "Öl", "süße Früchte"):
        assert EXTENDED(sentence).input_ids == OLD(sentence).input_ids


@settings(max_examples=500, deadline=None)
@given(st.text())
@example("</s> <pad> <s> <pad>")
@example("Spektrometer 漢字 \U0010ffff \x00 \u2028")
def test_an_extended_vocabulary_gives_back_any_text(text):
    ids = EXTENDED(text).input_ids
    assert EXTENDED.decode(ids, skip_special_tokens=True) == text


def test_an_extended_vocabulary_saves_and_loads(tmp_path):
    EXTENDED.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*NEW_SENTENCES, "</s> x"):
        assert loaded(text).input_ids == EXTENDED(text).input_ids
    assert loaded.split_special_tokens == OLD.split_special_tokens


def test_no_text_becomes_a_special_token():
    """Also where a tokenizer does not cut words at punctuation."""
    old = train_tokenizer(["a b"], vocab_size=259, show_progress=False)
    old.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    extended = extend_tokenizer(old, ["<pad></s>"] * 9, [], 50)
    assert len(extended) > 259
    ids = extended("<pad></s><pad>").input_ids
    assert set(ids[:-1]).isdisjoint({0, 1, 2})
    assert extended.decode(ids[:-1]) == "<pad></s><pad>"


def test_what_occurs_once_is_no_token():
    assert len(extend_tokenizer(OLD, ["Spektrometer"], [], 25)) == 300
    assert len(extend_tokenizer(OLD, ["Spektrometer"] * 2, [], 1)) == 301


def test_what_cannot_be_extended_is_refused():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        extend_tokenizer(OLD, SENTENCES, [], 0)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")))
    with pytest.raises(ValueError, match=r"expected a vocabulary of byte-level BPE or Unigram .* found WordLevel"):
        extend_tokenizer(other, SENTENCES, [], 5)


SYMBOLS = ["(NP", ")NP", "(NP-SBJ|1", "DT", "NN", ",", "-LRB-", "PRP$", "``", "'s", "NP"]
WITH_SYMBOLS = with_symbols(TOKENIZER, SYMBOLS)


def test_each_symbol_of_a_tree_is_one_token_and_comes_back_with_its_space(tmp_path):
    text = "(NP-SBJ|1 DT NN (NP `` PRP$ NN , )NP -LRB- NP 's"
    WITH_SYMBOLS.save_pretrained(tmp_path)
    for tokenizer in (WITH_SYMBOLS, AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.split()) + 1  # the end token
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert [symbol_ids(tokenizer)[symbol] for symbol in text.split()] == ids[:-1]


def test_symbols_are_those_given_and_no_others():
    assert symbol_ids(WITH_SYMBOLS).keys() == set(SYMBOLS)
    assert symbol_ids(TOKENIZER) == {}
    new = set(SYMBOLS) - {token.removeprefix("Ġ") for token in TOKENIZER.get_vocab() if token.startswith("Ġ")}
    assert len(WITH_SYMBOLS) == len(TOKENIZER) + len(new)
    assert len(set(WITH_SYMBOLS.get_vocab().values())) == len(WITH_SYMBOLS)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*SYMBOLS, *"()NP D,x\n  "]), max_size=12).map("".join))
@example("(NP )NP (NPx x(NP (NP\n")
def test_symbols_lose_no_text_and_brackets_are_never_parts_of_words(text):
    ids = WITH_SYMBOLS(text)["input_ids"]
    assert WITH_SYMBOLS.decode(ids, skip_special_tokens=True) == text
    brackets = {token: symbol for symbol, token in symbol_ids(WITH_SYMBOLS).items() if symbol[0] in "()"}
    found = [brackets[token] for token in ids if token in brackets]
    assert found == [piece for piece in text.split(" ") if piece in brackets.values()]


def test_words_are_split_as_without_symbols():
    for sentence in SENTENCES:
        assert WITH_SYMBOLS(sentence)["input_ids"] == TOKENIZER(sentence)["input_ids"]
