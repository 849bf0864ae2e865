import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.inference.long_lines import split_line


def words(text: str) -> int:
    return len(text.split())


def test_a_line_that_fits_is_left_alone():
    assert split_line(" One. Two.  Three. ", words, 3) == [" One. Two.  Three. "]


@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        ("He came. He saw! Did he win? …", 3, ["He came.", "He saw!", "Did he win?", "…"]),
        ('She said "No." Then (at last!) she left.', 5, ['She said "No."', "Then (at last!)", "she left."]),
        ("It costs 3.50 at a.b.c or so. Yes.", 7, ["It costs 3.50 at a.b.c or so.", "Yes."]),
        ("Wait... what?! Go.", 2, ["Wait...", "what?!", "Go."]),
        ("यह एक है। वह दो है।", 3, ["यह एक है।", "वह दो है।"]),
    ],
)
def test_a_longer_line_is_cut_at_every_sentence_end(text, limit, pieces):
    assert split_line(text, words, limit) == pieces


def test_no_white_space_is_needed_between_chinese_and_japanese_sentences():
    pieces = split_line("今日は晴れ。「本当？」はい！明日、雨。", len, 8)
    assert pieces == ["今日は晴れ。", "「本当？」", "はい！", "明日、雨。"]
    assert split_line("我来了，我看见，我征服。", len, 7) == ["我来了，", "我看见，", "我征服。"]


def test_a_sentence_that_is_too_long_is_cut_at_clauses_and_then_at_white_space():
    assert split_line("a b, c d, e f; g h.", words, 4) == ["a b, c d,", "e f; g h."]
    assert split_line("a b c d e f, g.", words, 4) == ["a b c", "d e f,", "g."]
    assert split_line("one two three four five", words, 2) == ["one two", "three", "four five"]


def test_a_word_that_is_too_long_is_an_error():
    with pytest.raises(ValueError, match=r"12 tokens without white space .* where 5 are allowed: 'abcdefghijkl'"):
        split_line("a b. abcdefghijkl c.", len, 5)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab .,!?;\"')。、」 \t\u00a0", max_size=80), st.integers(1, 20))
def test_nothing_but_white_space_is_lost_and_no_piece_is_too_long(text, limit):
    longest = max(map(len, text.split()), default=0)
    if longest > limit:
        limit = longest
    pieces = split_line(text, len, limit)
    assert re.sub(r"\s", "", "".join(pieces)) == re.sub(r"\s", "", text)
    assert all(len(piece) <= limit for piece in pieces)


def test_a_long_run_of_marks_takes_no_quadratic_time():
    """By the square of its length it would take hours."""
    with pytest.raises(ValueError, match="1000000 tokens"):
        split_line("." * 1_000_000, len, 10)
