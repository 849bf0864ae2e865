import pytest

from training.evaluation.alignment_error import GoldLinks, parse_links, read_gold_links, score_alignments


def test_sure_and_possible_links_are_told_apart():
    gold = parse_links(" 0-0 1-12\t2?1 3p1 ")
    assert gold == GoldLinks(sure={(0, 0), (1, 12)}, possible={(0, 0), (1, 12), (2, 1), (3, 1)})
    assert parse_links("") == GoldLinks(set(), set())


def test_the_error_rate_counts_sure_links_twice():
    """By hand. A has 5 links; 2 of the 3 sure ones are found (S), and 1 that is only possible, so |A & P| is 3."""
    gold = [parse_links("0-0 1-1 2?1"), parse_links("0-1 1?1")]
    predicted = [[(0, 0), (2, 1), (3, 2)], [(0, 1), (1, 0)]]
    score = score_alignments(predicted, gold)
    assert score.precision == pytest.approx(3 / 5)
    assert score.recall == pytest.approx(2 / 3)
    assert score.error_rate == pytest.approx(1 - (2 + 3) / (5 + 3))


def test_all_sure_links_and_nothing_else_is_no_error():
    gold = [parse_links("0-0 1-1 1?0")]
    assert score_alignments([[(0, 0), (1, 1)]], gold).error_rate == 0
    assert score_alignments([[(0, 0), (1, 1), (1, 0)]], gold).error_rate == 0  # nor is a possible one
    assert score_alignments([[(0, 1)]], gold).error_rate == 1


def test_a_share_of_nothing_is_missing():
    score = score_alignments([[]], [parse_links("0?0")])
    assert (score.precision, score.recall, score.error_rate) == (None, None, None)
    score = score_alignments([[]], [parse_links("0-0")])
    assert (score.precision, score.recall, score.error_rate) == (None, 0, 1)
    assert str(score) == "precision none, recall 0.000, alignment error rate 1.000"


def test_pairs_without_gold_are_not_dropped():
    with pytest.raises(ValueError, match="shorter"):
        score_alignments([[], []], [parse_links("")])


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (["0-0", "0-0 1:1"], [":2:", "1:1"]),
        (["0-0", "0--1"], [":2:", "0--1"]),
        (["0-0 2-0", ""], [":1:", "word 2", "source", "2 words", "2-0"]),
        (["0-0", "0?0 0?1"], [":2:", "word 1", "translation", "1 words", "0-1"]),
        (["0-0"], ["expected 2 lines", "found 1"]),
        (["0-0", "", ""], ["expected 2 lines", "found 3"]),
    ],
)
def test_a_gold_file_that_does_not_fit_is_named(tmp_path, lines, facts):
    file = tmp_path / "gold.align"
    file.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError) as error:
        read_gold_links(str(file), ["a b", "a"], ["c", "d"])
    for fact in [str(file), *facts]:
        assert fact in str(error.value)


def test_gold_is_read_line_by_line(tmp_path):
    file = tmp_path / "gold.align"
    file.write_text("0-0 1?0\n\n")
    gold = read_gold_links(str(file), ["a b", "a"], ["c", "d"])
    assert gold == [GoldLinks({(0, 0)}, {(0, 0), (1, 0)}), GoldLinks(set(), set())]
