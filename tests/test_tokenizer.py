import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.tokenizer import train_tokenizer


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
