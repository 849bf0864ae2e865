"""Rules of EVALB with COLLINS.prm, on trees whose brackets are counted by hand."""

import pytest

from training.data.brackets import agreement, f1, scored_label
from training.data.trees import parse_tree


def counts(gold: str, predicted: str) -> tuple[int, int, int]:
    return tuple(agreement(parse_tree(gold), parse_tree(predicted)))


DOG = "(S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .))"  # S, NP, VP


def test_equal_trees_agree_in_every_bracket():
    assert counts(DOG, DOG) == (3, 3, 3)
    assert agreement(parse_tree(DOG), parse_tree(DOG)).is_exact


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ("(S (NP (DT the) (NN dog)) (NP (VBZ barks)) (. .))", (2, 3, 3)),  # another label
        ("(S (NP (DT the)) (VP (NN dog) (VBZ barks)) (. .))", (1, 3, 3)),  # other words in both phrases
        ("(S (DT the) (NN dog) (VBZ barks) (. .))", (1, 3, 1)),
        ("(S (NP (DT the) (NN dog)) (VP (VP (VBZ barks))) (. .))", (3, 3, 4)),
        ("(S (NP (NN the) (VB dog)) (VP (NN barks)) (NN .))", (3, 3, 3)),  # tags are not scored
    ],
)
def test_a_bracket_is_a_label_and_its_words(predicted, expected):
    assert counts(DOG, predicted) == expected
    assert agreement(parse_tree(DOG), parse_tree(predicted)).is_exact == (expected == (3, 3, 3))


def test_the_root_does_not_count():
    assert counts(f"(TOP {DOG})", DOG) == counts(DOG, f"(TOP {DOG})") == (3, 3, 3)
    assert counts(DOG, DOG.replace("(S", "(TOP", 1)) == (2, 3, 2)


@pytest.mark.parametrize("tag", [",", ":", "``", "''", "."])
def test_punctuation_may_belong_to_any_phrase(tag):
    gold = f"(S (NP (NN a)) ({tag} x) (VP (VB b)))"
    assert counts(gold, f"(S (NP (NN a) ({tag} x)) (VP (VB b)))") == (3, 3, 3)
    # A phrase of punctuation alone does not count.
    assert counts(gold, f"(S (NP (NN a)) (PRN ({tag} x)) (VP (VB b)))") == (3, 3, 3)


@pytest.mark.parametrize("tag", ["-LRB-", "HYPH", "SYM", "$", "NN"])
def test_other_signs_are_words(tag):
    gold = f"(S (NP (NN a)) ({tag} x) (VP (VB b)))"
    assert counts(gold, f"(S (NP (NN a) ({tag} x)) (VP (VB b)))") == (2, 3, 3)
    assert counts(gold, f"(S (NP (NN a)) (PRN ({tag} x)) (VP (VB b)))") == (3, 3, 4)


def test_the_gold_tags_say_what_is_punctuation():
    gold = "(S (NP (NN a)) (, ,) (VP (VB b)))"
    assert counts(gold, "(S (NP (XX a) (XX ,)) (VP (XX b)))") == (3, 3, 3)
    # The predicted tags would remove the word `a`, and with it the NP.
    assert counts(gold, "(S (NP (, a)) (NN ,) (VP (VB b)))") == (3, 3, 3)


def test_advp_and_prt_are_one_label():
    assert counts("(VP (VB go) (PRT (RP on)))", "(VP (VB go) (ADVP (RB on)))") == (2, 2, 2)


def test_two_phrases_of_one_label_over_the_same_words_are_two_brackets():
    assert counts("(NP (NP (NN a)))", "(NP (NN a))") == (1, 2, 1)
    assert counts("(NP (NN a))", "(NP (NP (NN a)))") == (1, 1, 2)
    assert counts("(NP (NP (NN a)))", "(NP (NP (NN a)))") == (2, 2, 2)
    # PRT and ADVP are counted together here too.
    assert counts("(PRT (ADVP (RB a)))", "(ADVP (RB a))") == (1, 2, 1)


def test_function_tags_and_indices_are_ignored():
    gold = "(S (NP-SBJ-1 (NN a)) (VP=2 (VB b)))"
    assert counts(gold, "(S (NP (NN a)) (VP (VB b)))") == (3, 3, 3)
    assert counts("(TOP-1 (NP (NN a)))", "(NP-TMP (NN a))") == (1, 1, 1)
    assert [scored_label(label) for label in ("NP", "NP-SBJ-1", "S=1-TPC", "PRT-CLR")] == ["NP", "NP", "S", "ADVP"]


def test_traces_are_not_words():
    gold = "(S (NP (-NONE- *)) (VP (VB go) (ADVP (RB on))))"
    assert counts(gold, "(S (VP (VB go) (ADVP (RB on))))") == (3, 3, 3)
    assert counts(gold, gold) == (3, 3, 3)
    # A parser that has seen the trace as a word.
    assert counts(gold, "(S (NP (NN *)) (VP (VB go)) (ADVP (RB on)))") == (2, 3, 3)


@pytest.mark.parametrize(
    "predicted",
    [DOG.replace("dog", "cat"), DOG.replace("(. .)", "(. .) (. .)"), "(S (NP (DT the) (NN dog)) (VP (VB barks)))"],
)
def test_no_bracket_agrees_over_other_words(predicted):
    assert counts(DOG, predicted) == (0, 3, 3)


def test_without_a_tree_the_gold_brackets_are_missed():
    assert tuple(agreement(parse_tree(DOG), None)) == (0, 3, 0)


def test_f1_by_hand():
    """3 of 5 gold and of 4 predicted brackets: precision 3/4, recall 3/5."""
    assert f1(3, 5, 4) == pytest.approx(100 * 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))
    assert f1(0, 0, 0) == 0
