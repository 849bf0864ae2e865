"""Trees are read, linearised and restored; errors have a position; symbols become a tree over exactly the words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.trees import (
    MENDED,
    Tree,
    TreeError,
    linearise,
    parse_tree,
    read_trees,
    restore,
    tree_words,
    without_functions,
    without_traces,
)


DOG = "(S (NP (DT The) (NN dog)) (VP (VBZ barks)) (. .))"
DOG_SYMBOLS = ["(S", "(NP", "DT", "NN", ")NP", "(VP", "VBZ", ")VP", ".", ")S"]
DOG_WORDS = ["The", "dog", "barks", "."]

texts = st.text("abS-=|.,´é\u0301🐕", min_size=1, max_size=3)
labels = st.sampled_from(["S", "NP", "VP", "PP", "TOP", "XX"]) | texts
trees = st.recursive(
    st.builds(lambda tag, word: Tree(tag, [word]), labels, texts),
    lambda children: st.builds(Tree, labels, st.lists(children, min_size=1, max_size=4)),
    max_leaves=15,
)
# All kinds of symbols, over few labels, so that many brackets find each other.
symbols = st.lists(
    st.sampled_from(["(S", "(NP", "(VP", ")S", ")NP", ")VP", "NN", "VB"]) | st.text(max_size=4), max_size=40
)
seeded = settings(derandomize=True, deadline=None, max_examples=100)


def test_a_tree_has_words_tags_and_spans():
    tree = parse_tree(DOG)
    assert str(tree) == DOG
    assert tree.words() == DOG_WORDS
    assert tree.tags() == ["DT", "NN", "VBZ", "."]
    assert tree.spans() == [("S", 0, 4), ("NP", 0, 2), ("VP", 2, 3)]
    assert linearise(tree) == DOG_SYMBOLS
    assert linearise(tree, tags="XX") == ["(S", "(NP", "XX", "XX", ")NP", "(VP", "XX", ")VP", "XX", ")S"]


def test_unary_chains_escapes_and_a_single_tag_stay():
    for text in ("(S (S (NP (NP (NN a)))))", "(NP (-LRB- -LRB-) (NN a) (-RRB- -RRB-))", "(NN Brain)"):
        assert str(parse_tree(text)) == text


def test_trees_are_equal_if_they_are_written_the_same():
    assert parse_tree(DOG) == parse_tree(DOG.replace(" (", "  \t("))
    assert parse_tree(DOG) != parse_tree(DOG.replace("dog", "cat"))
    assert parse_tree(DOG) != DOG


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("( (S (NN a)))", "(S (NN a))"),
        ("((S (NN a)) )", "(S (NN a))"),
        ("( (S (NN a)) (. .) )", "(TOP (S (NN a)) (. .))"),
        ("(TOP (S (NN a)))", "(TOP (S (NN a)))"),
    ],
)
def test_an_outer_bracket_without_a_label_is_no_phrase(text, expected):
    assert str(parse_tree(text)) == expected


@pytest.mark.parametrize(
    ("text", "column", "found"),
    [
        ("", 1, "nothing"),
        ("  ", 1, "nothing"),
        ("a", 1, "'a'"),
        (" ) ", 2, "')'"),
        ("(S (NN a)", 1, "1 bracket is missing"),
        ("(S (NP (NN a", 1, "3 brackets are missing"),
        ("(S (NN a)))", 11, "')'"),
        ("(S (NN a)) (S (NN b))", 12, "'('"),
        ("(S (NN a)) b", 12, "'b'"),
        ("(S (NP ) (NN a))", 4, "'(NP)'"),
        ("(S () (NN a))", 4, "'()'"),
        ("(S ((NN a)))", 4, "label"),
        ("(S (NN a b))", 4, "'a' and 1 more"),
        ("(S (NP (NN a) b))", 4, "'b' and 1 more"),
    ],
)
def test_a_broken_tree_has_a_position(text, column, found):
    with pytest.raises(TreeError) as error:
        parse_tree(text)
    assert (error.value.line, error.value.column) == (1, column)
    assert found in error.value.reason and f"column {column}" in str(error.value)


def test_trees_stand_on_one_line_or_on_several():
    file = ["(S (NN a))", "", "( (S", "    (NP (NN b))", "", "\t(VP (VB c)) ))", "(S (NN d))  "]
    found = [(line, str(tree)) for line, tree in read_trees(file)]
    assert found == [(1, "(S (NN a))"), (3, "(S (NP (NN b)) (VP (VB c)))"), (7, "(S (NN d))")]


@pytest.mark.parametrize(
    ("file", "line", "column", "found"),
    [
        (["(S (NN a))", "(S (NN b)", "(S (NN c))", "(S (NN d)))"], 3, 1, "line 2"),  # brackets balance over all lines
        (["(S (NN a))", "(S (NN b)))", "(S (NN c))"], 2, 11, "')'"),
        (["(S", "  (NN a))", "(S", "  (NN b)"], 3, 1, "line 3"),
        (["(S", "  (NP))"], 2, 3, "'(NP)'"),
    ],
)
def test_a_broken_tree_of_a_file_has_a_line(file, line, column, found):
    with pytest.raises(TreeError) as error:
        list(read_trees(file))
    assert (error.value.line, error.value.column) == (line, column) and found in error.value.reason


def test_traces_and_phrases_without_words_are_removed_and_counted():
    tree = parse_tree(
        "(S (NP-SBJ (-NONE- *)) (VP (VB Go) (SBAR (WHNP (-NONE- 0)) (S (NP (PRP it)) (VP (-NONE- *T*))))))"
    )
    copy, traces = without_traces(tree)
    assert (str(copy), traces) == ("(S (VP (VB Go) (SBAR (S (NP (PRP it))))))", 3)
    assert without_traces(parse_tree("(S (NP (-NONE- *)))")) == (None, 1)
    assert "-NONE-" in str(tree)


def test_functions_are_removed_and_counted():
    tree = parse_tree("(S (NP-SBJ-1 (-LRB- -LRB-) (NN x-ray=1)) (VP=2 (VB-X go)) (ADVP|PRT (RB on)))")
    copy, changed = without_functions(tree)
    assert str(copy) == "(S (NP (-LRB- -LRB-) (NN x-ray=1)) (VP (VB go)) (ADVP|PRT (RB on)))"
    assert changed == 3 and "NP-SBJ-1" in str(tree)


@pytest.mark.parametrize(
    ("symbols", "words", "expected", "counts"),
    [
        ("(S (NP DT NN", "a b", "(S (NP (DT a) (NN b)))", {"missing brackets": 2}),
        ("(S (NP DT )S", "a", "(S (NP (DT a)))", {"missing brackets": 1}),
        # The VP closes with the NP around it, and the brackets that follow find theirs.
        ("(S (NP (VP NN )NP VB )S", "a b", "(S (NP (VP (NN a))) (VB b))", {"missing brackets": 1}),
        # Crossing brackets: the second of them finds nothing open.
        ("(S (NP (VP NN )NP )VP VB )S", "a b", "(S (NP (VP (NN a))) (VB b))",
         {"missing brackets": 1, "surplus brackets": 1}),
        (")NP (S NN )VP )S )S", "a", "(S (NN a))", {"surplus brackets": 3}),
        ("(S NN VB JJ )S", "a b", "(S (NN a) (VB b))", {"surplus words": 1}),
        ("(S (NP NN )NP )S", "a b c", "(S (NP (NN a)) (XX b) (XX c))", {"missing words": 2}),
        ("(S NN )S (VP VB )VP", "a b", "(S (NN a) (VP (VB b)))", {"early ends": 1, "missing brackets": 1}),
        ("(S (NP NN )S VB", "a b", "(S (NP (NN a)) (VB b))", {"missing brackets": 2, "early ends": 1}),
        ("(S (NP )NP NN (VP (PP )S", "a", "(S (NN a))", {"empty phrases": 3, "missing brackets": 2}),
        ("(NP )NP (S NN )S", "a", "(S (NN a))", {"empty phrases": 1}),
        ("NN VB", "a b", "(TOP (NN a) (VB b))", {"missing roots": 1}),
        ("NN (VP VB )VP JJ", "a b c", "(TOP (NN a) (VP (VB b)) (JJ c))", {"missing roots": 1}),
        ("NN", "a b", "(TOP (NN a) (XX b))", {"missing roots": 1, "missing words": 1}),
        ("", "a", "(TOP (XX a))", {"missing roots": 1, "missing words": 1}),
        ("(S NN ( ) (a(b a)b )S", "a", "(S (NN a))", {"unreadable": 4}),
        ("NN", "a", "(NN a)", {}),
        ("(S (S (S NN )S )S )S", "a", "(S (S (S (NN a))))", {}),
    ],
)  # fmt: skip
def test_what_is_malformed_is_mended_by_the_rule(symbols, words, expected, counts):
    tree, found = restore(symbols.split(), words.split())
    assert (str(tree), dict(found)) == (expected, counts)
    assert counts.keys() <= MENDED.keys()


def test_given_tags_replace_the_symbols():
    tree, counts = restore(["(S", "XX", "XX", ")S"], ["a", "b", "c"], tags=["NN", "VB", "."])
    assert (str(tree), dict(counts)) == ("(S (NN a) (VB b) (. c))", {"missing words": 1})


@pytest.mark.parametrize(
    ("words", "tags", "found"),
    [([], None, "word"), (["a"], ["NN", "VB"], "2 tags"), (["a("], None, "'a('"), (["a b"], None, "'a b'"),
     ([""], None, "''"), (["a"], ["N)"], "'N)'")],
)  # fmt: skip
def test_words_that_no_tree_can_hold_are_an_error(words, tags, found):
    with pytest.raises(ValueError, match=r"tree|tags") as error:
        restore(["(S", "NN", ")S"], words, tags)
    assert found in str(error.value)


def test_tags_are_kept_or_unknown():
    with pytest.raises(ValueError, match="'drop'"):
        linearise(parse_tree(DOG), tags="drop")


@seeded
@given(trees)
def test_a_tree_comes_back_from_its_text_and_from_its_symbols(tree):
    assert parse_tree(str(tree)) == tree
    assert list(read_trees([str(tree), "", str(tree)])) == [(1, tree), (3, tree)]
    assert restore(linearise(tree), tree.words()) == (tree, {})
    assert restore(linearise(tree, tags="XX"), tree.words(), tree.tags()) == (tree, {})
    assert len(linearise(tree)) == len(tree.words()) + 2 * len(tree.spans())


@seeded
@given(symbols, st.lists(texts, min_size=1, max_size=12))
def test_any_symbols_become_a_well_formed_tree_over_exactly_the_words(symbols, words):
    tree, counts = restore(symbols, words)
    assert tree.words() == words
    assert parse_tree(str(tree)) == tree
    assert restore(linearise(tree), words) == (tree, {})
    assert all(counts.values()) and counts.keys() <= MENDED.keys()
    assert bool(counts) == (linearise(tree) != symbols)


@seeded
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("() \t\u3000\x1c"), max_size=20))
def test_the_words_of_any_sentence_fit_into_a_tree(sentence):
    words = tree_words(sentence)
    assert words == sentence.replace("(", "-LRB-").replace(")", "-RRB-").split()
    if words:
        assert parse_tree(str(restore([], words)[0])).words() == words


def test_deep_trees_need_no_recursion():
    depth = 5_000
    text = "(S " * depth + "(NN a)" + ")" * depth
    tree = parse_tree(text)
    assert str(tree) == text and tree == parse_tree(text)
    assert len(tree.spans()) == depth and tree.words() == ["a"]
    assert restore(linearise(tree), ["a"]) == (tree, {})
    assert without_functions(tree) == (tree, 0) and without_traces(tree) == (tree, 0)
    assert repr(tree).startswith("<Tree (S (S")
