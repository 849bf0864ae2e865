"""Extension of Unigram vocabularies, on tables of scores written by hand, and beside SentencePiece."""

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.conversion.tokenizers import (
    SETTINGS,
    SentencePieceModel,
    from_bpe_codes,
    from_sentencepiece,
    read_sentencepiece,
)
from training.data.tokenizer import extend_tokenizer, parts_of_new_tokens
from training.data.two_sided_tokenizer import TwoSidedTokenizer
from training.demo_data import generate_pairs
from training.inference.loading import load_tokenizer


SPECIAL = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
SOURCE = {"▁": -2.0, "a": -3.0, "b": -3.0, "c": -3.5, "▁a": -2.5, "bc": -4.0, ".": -3.0, "1": -3.0}
TARGET = {"▁": -2.0, "a": -3.0, "ß": -3.5, "▁ß": -4.0}
SHARED = ["</s>", "<unk>", ">>de<<", *SOURCE, "ß", "▁ß", "<pad>"]  # "▁" is 3, "a" 4, ..., "ß" 11, "▁ß" 12, pad 13


def side(scores: dict[str, float], tokens: list[str]) -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate(tokens)}
    made = from_sentencepiece(SentencePieceModel(scores, b""), ids, SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL, **SETTINGS)


def two_sides(source: list[str] = SHARED, target: list[str] = SHARED, size: int = 14) -> TwoSidedTokenizer:
    return TwoSidedTokenizer(side(SOURCE, source), side(TARGET, target).backend_tokenizer, size)


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])[:-1]


def read(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def written(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text_target=text)["input_ids"]


ONE = side(SOURCE, ["</s>", "<unk>", ">>de<<", *SOURCE, "<pad>"])  # ids 0 to 11


def test_a_frequent_unknown_character_gets_the_next_id_and_comes_back():
    assert read(ONE, "aéb") == [7, 1, 5, 0]
    extended = extend_tokenizer(ONE, ["é ñ"] * 2, ["é ü"], 1)
    assert len(extended) == 13
    assert read(extended, "aéb") == [7, 12, 5, 0]
    assert extended.decode(read(extended, "aéb éé"), skip_special_tokens=True) == "aéb éé"
    assert read(extended, "ñ") == [3, 1, 0]  # less frequent
    both = extend_tokenizer(ONE, ["é ñ"] * 2, ["é ü"], 9)
    assert both.convert_ids_to_tokens(range(12, len(both))) == ["é", "ñ", "▁é", "▁ñ"]  # "ü" occurs once


def test_a_frequent_word_becomes_one_piece_and_other_text_keeps_its_tokens():
    assert pieces(ONE, "abc") == ["▁a", "bc"]
    extended = extend_tokenizer(ONE, ["abc"], ["abc"], 1)
    assert pieces(extended, "abc abc") == ["▁abc", "▁abc"]
    assert read(extended, "abc") == [12, 0]
    for text in ("a bc", "cabc", "ab", "bca", "", "abb c."):
        assert read(extended, text) == read(ONE, text), text


def test_the_old_segmentation_decides_and_then_the_fewest_pieces():
    """Of the old segmentation: ▁ab and c are worse than ▁a and bc, which "abc" had."""
    extended = extend_tokenizer(ONE, ["cb"] * 9 + ["bcc"] * 5 + ["ab"] * 4, [], 99)
    assert {"▁c", "▁cb", "▁bc", "▁bcc", "▁ab"} == set(extended.convert_ids_to_tokens(range(12, len(extended))))
    assert pieces(extended, "ab") == ["▁ab"]
    assert pieces(ONE, "bcc") == ["▁", "bc", "c"] and pieces(extended, "bcc") == ["▁bcc"]
    assert pieces(extended, "abc") == pieces(ONE, "abc") == ["▁a", "bc"]


def test_no_piece_crosses_a_space_or_the_end_of_letters_or_digits():
    extended = extend_tokenizer(ONE, ["ab. a1 11 .. a b"] * 9, [], 99)
    new = extended.convert_ids_to_tokens(range(12, len(extended)))
    assert sorted(new) == ["▁.", "▁..", "▁1", "▁11", "▁ab", "▁b"]


def test_a_language_code_is_no_part_of_a_piece():
    extended = extend_tokenizer(ONE, [">>de<< abc"] * 9, [], 1)
    assert pieces(extended, ">>de<< abc") == [">>de<<", "▁abc"]
    extended = extend_tokenizer(ONE, [".>>de<<"] * 9, [], 99)
    assert extended.convert_ids_to_tokens(range(12, len(extended))) == ["▁."]


def test_characters_of_the_other_side_are_pieces_of_both():
    """Before, a source had them alone only; a run of two was one <unk>."""
    old = two_sides()
    assert [read(old, "aß"), read(old, "ßß")] == [[7, 11, 0], [3, 1, 0]]
    extended = extend_tokenizer(old, ["c"], ["a"], 5)
    assert len(extended) == extended.target_vocab_size == len(old)  # nothing occurs twice
    assert [read(extended, "aß"), read(extended, "ßß")] == [[7, 11, 0], [3, 11, 11, 0]]
    assert written(extended, "aß") == written(old, "aß") == [3, 4, 11, 0]
    assert extended.decode([7, 11, 0], skip_special_tokens=True) == "aß"


def test_both_sides_share_new_tokens_and_each_segments_them_its_own_way():
    old = two_sides()
    assert read(old, "aßa") == [7, 11, 4, 0] and written(old, "aßa") == [3, 4, 11, 4, 0]
    extended = extend_tokenizer(old, ["é"], ["aßa é"] * 2, 4)
    assert extended.convert_ids_to_tokens(range(14, 18)) == ["é", "▁é", "▁aß", "▁aßa"]  # "▁a" has the id 7
    assert len(extended) == len(extended.target_side) == extended.target_vocab_size == 18
    assert extended.target_side.convert_ids_to_tokens(range(18)) == extended.convert_ids_to_tokens(range(18))
    assert extended.convert_ids_to_tokens(range(14)) == SHARED
    assert read(extended, "aßa") == written(extended, "aßa")
    assert len(written(extended, "aßa")) == 2
    for text in ("é", "aßa", "a é ß"):
        assert extended.decode(written(extended, text), skip_special_tokens=True) == text
        assert extended.decode(read(extended, text), skip_special_tokens=True) == text
    of_sources, of_targets = parts_of_new_tokens(old, extended)
    last = read(extended, "aßa")[0]
    assert (of_sources[14], of_sources[last]) == ([1], [7, 11, 4])
    assert (of_targets[14], of_targets[last]) == ([1], [3, 4, 11, 4])
    assert (of_sources[15], of_targets[15]) == ([3, 1], [3, 1])


def test_tokens_of_sources_only_move_behind_the_new_ones():
    """Two vocabularies: translations have the ids 0 to 6, and the first 7 tokens of sources are these."""
    common = ["</s>", "<unk>", "▁", "a", "ß", "▁ß", "<pad>"]
    old = two_sides([*common, "b", "c", "▁a", "bc", ".", "1"], common, 7)
    assert (read(old, "abc"), written(old, "aß")) == ([9, 10, 0], [2, 3, 4, 0])
    extended = extend_tokenizer(old, ["abc"] * 2, ["bb"] * 3, 2)
    assert extended.target_vocab_size == len(extended.target_side) == 9
    assert extended.target_side.convert_ids_to_tokens([7, 8]) == ["b", "▁b"] == extended.convert_ids_to_tokens([7, 8])
    assert written(extended, "bb") == [8, 7, 0]
    assert extended.decode([8, 7, 0], skip_special_tokens=True) == "bb"
    assert len(extended) == 14  # "b" was one of sources
    assert extended.convert_ids_to_tokens(range(9, 14)) == ["c", "▁a", "bc", ".", "1"]
    assert read(extended, "abc") == [10, 11, 0]
    of_sources, of_targets = parts_of_new_tokens(old, extended)
    assert of_sources == {7: [7], 8: [2, 7], 9: [8], 10: [9], 11: [10], 12: [11], 13: [12]}
    assert of_targets == {7: [1], 8: [2, 1]}


def test_pieces_that_the_vocabulary_lacks_are_written_otherwise():
    """ "▁ß" has an id behind those of translations, so it was <unk>."""
    tokens = [*(token for token in SHARED if token != "▁ß"), "▁ß"]
    old = two_sides(tokens[:-1], tokens, 13)
    assert written(old, "ß") == [1, 0]
    extended = extend_tokenizer(old, ["abc"] * 2, [], 1)
    assert extended.target_vocab_size == len(extended.target_side) == len(extended) == 14
    assert written(extended, "ß") == [3, 11, 0]


def test_names_of_special_tokens_stay_text():
    extended = extend_tokenizer(ONE, ["</s> <unk> <pad>"] * 9, [], 60)
    for text in ("</s>", "<pad>", "a</s>b", "<unk> <pad>", "</s", "/s>"):
        ids = read(extended, text)
        assert not set(ids[:-1]) & {0, 1, 11}, text
        assert extended.decode(ids, skip_special_tokens=True) == text
    some = extend_tokenizer(ONE, ["<s <s"] * 9, [], 2)  # of "</s>", these only are known
    assert [token for token in read(some, "</s>")[:-1] if token in (0, 11)] == []


@pytest.mark.parametrize("times", [1, 2])
def test_an_extended_vocabulary_saves_loads_and_extends_again(times, tmp_path):
    tokenizer = two_sides()
    for text in ("abé", "ßbébaß")[:times]:
        tokenizer = extend_tokenizer(tokenizer, [text] * 2, [text] * 2, 5)
    tokenizer.save_pretrained(tmp_path)
    loaded, source = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.target_vocab_size == tokenizer.target_vocab_size == len(source) > 14
    assert loaded.convert_ids_to_tokens(range(14)) == SHARED
    assert loaded.split_special_tokens and loaded.model_max_length == tokenizer.model_max_length
    for text in ("abé", "ßbébaß", "a b", "</s> >>de<< c"):
        assert read(loaded, text) == read(tokenizer, text) == source(text)["input_ids"]
        assert written(loaded, text) == written(tokenizer, text)
    assert len(read(loaded, ("abé", "ßbébaß")[times - 1])) == 2


def fewest(parts: list[str], new: set[str]) -> int:
    """Smallest number of tokens, each of which is one part or a new piece of neighbouring parts."""
    counts = [0]
    for end in range(1, len(parts) + 1):
        starts = [start for start in range(end) if end - start == 1 or "".join(parts[start:end]) in new]
        counts.append(1 + min(counts[start] for start in starts))
    return counts[-1]


def test_new_pieces_join_those_of_sentencepiece_and_as_many_as_possible(tmp_path):
    """The oracle is SentencePiece with the new characters, and the same scores."""
    pytest.importorskip("sentencepiece", reason="SentencePiece is in the extra dev")
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    from support.sentencepiece_models import train

    old_texts = [source for source, _ in generate_pairs(300)]
    path = Path(tmp_path, "old.spm")
    known = train(path, old_texts, 200)
    tokenizer = side(read_sentencepiece(path).scores, ["</s>", "<unk>", *known, "<pad>"])
    new_texts = [target.replace("n", "ñ").replace("der", "漢字") for _, target in generate_pairs(300, seed=5)]
    extended = extend_tokenizer(tokenizer, new_texts, old_texts, 150)
    tokens = extended.convert_ids_to_tokens(range(len(tokenizer), len(extended)))
    assert len(tokens) == 150 and {"ñ", "漢", "字"} <= set(tokens)

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(path.read_bytes())
    lowest = min(piece.score for piece in model.pieces if piece.type == piece.NORMAL)
    for token in tokens:
        if len(token) == 1:
            model.pieces.add(piece=token, score=lowest)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    words = sorted({word for text in (*old_texts, *new_texts) for word in text.split()})
    chosen = random.Random(0)
    mixed = [" ".join(chosen.choices(words, k=8)) for _ in range(100)]
    mixed += ["".join(chosen.choices(words, k=2)) for _ in range(200)]
    shorter = 0
    for text in (*old_texts[:100], *new_texts[:100], *mixed):
        expected, found = oracle.encode(text, out_type=str), pieces(extended, text)
        if "<unk>" in found:
            assert 0 in oracle.encode(text)
            continue
        ends = [{len("".join(parts[:i])) for i in range(1, len(parts) + 1)} for parts in (expected, found)]
        assert "".join(found) == "".join(expected) and ends[1] <= ends[0], text
        assert len(found) == fewest(expected, set(tokens)), text
        shorter += len(found) < len(expected)
    assert shorter > 200


# Mistakes


def unigram(byte_fallback: bool = False, unk_id: int | None = 0, added: str = "") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("<0x41>", -9.0)], unk_id, byte_fallback))
    tokenizer.add_tokens([AddedToken(token) for token in added.split()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "found"),
    [
        (unigram(byte_fallback=True), "byte fallback"),
        (unigram(unk_id=None), "no unknown token"),
        (unigram(added="<lang> <more>"), "'<lang>'"),
        (PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, []))), "found BPE"),
        (
            PreTrainedTokenizerFast(tokenizer_object=from_bpe_codes([], {"</s>": 0, "<unk>": 1, "a</w>": 2}, SPECIAL)),
            "BPE of words that end in </w>",
        ),
    ],
    ids=["byte fallback", "no unk", "added tokens", "BPE", "BPE of FSMT"],
)
def test_other_vocabularies_are_refused_in_one_line(tokenizer, found):
    with pytest.raises(ValueError, match="extend_vocabulary: ") as error:
        extend_tokenizer(tokenizer, ["a a"], [], 5)
    assert found in str(error.value) and "\n" not in str(error.value)


def test_a_vocabulary_of_unigram_from_elsewhere_is_extended():
    """Its normaliser does not tell unknown characters apart."""
    extended = extend_tokenizer(unigram(), ["aa"] * 2, ["é"] * 2, 9)
    assert extended.convert_ids_to_tokens(extended("aaéa")["input_ids"]) == ["aa", "é", "a"]
