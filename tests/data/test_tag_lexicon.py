"""Which tags a word may have, by hand-written trees."""

import gzip

import pytest

from training.data.readers import DataError
from training.data.tag_lexicon import KNOWN, TagLexicon


def trees(*words: tuple[str, str]) -> str:
    return "".join(f"(S ({tag} {word}))\n" for word, tag in words)


@pytest.fixture
def lexicon(tmp_path):
    """`the` is a known word, `run` a rare one of two tags; five nouns occur once, and only four verbs."""
    nouns = [(f"noun{number}", "NN") for number in range(KNOWN)]
    verbs = [(f"verb{number}", "VB") for number in range(KNOWN - 1)]
    (tmp_path / "a.trees").write_text(trees(*[("the", "DT")] * KNOWN, ("run", "VB"), ("run", "JJ")), encoding="utf-8")
    with gzip.open(tmp_path / "b.trees.gz", "wt", encoding="utf-8") as file:
        file.write(trees(*nouns, *verbs))
    return TagLexicon([str(tmp_path / "a.trees"), str(tmp_path / "b.trees.gz")])


@pytest.mark.parametrize(
    ("word", "tags"),
    [("the", {"DT"}), ("run", {"VB", "JJ", "NN"}), ("noun0", {"NN"}), ("verb0", {"VB", "NN"}), ("new", {"NN"})],
)
def test_known_words_have_their_tags_and_rare_ones_those_of_rare_words_too(lexicon, word, tags):
    assert lexicon.tags(word) == tags


def test_without_rare_words_nothing_is_known_of_a_new_one(tmp_path):
    (tmp_path / "a.trees").write_text(trees(*[("the", "DT")] * KNOWN), encoding="utf-8")
    assert TagLexicon([str(tmp_path / "a.trees")]).tags("new") == set()


def test_a_broken_tree_is_named(tmp_path):
    (tmp_path / "a.trees").write_text("(S (DT the))\n(S (DT the)\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.trees:2: "):
        TagLexicon([str(tmp_path / "a.trees")])
