import pytest

from training.demo_data import (
    ADJECTIVES,
    MODALS,
    PEOPLE,
    THINGS,
    Clause,
    NounPhrase,
    Verb,
    generate_pairs,
    write_demo_data,
)


NOUNS = {noun.english: noun for noun in PEOPLE + THINGS}
VERBS = {
    "pick up": Verb("pick up", "picks up", "picked up", "holt", "holen", "abholen", "abgeholt", "ab"),
    "give": Verb("give", "gives", "given", "gibt", "geben", "geben", "gegeben"),
}


def phrase(determiner: str, noun: str, adjective: str | None = None, plural: bool = False) -> NounPhrase:
    pair = (adjective, dict(ADJECTIVES)[adjective]) if adjective else None
    return NounPhrase(determiner, pair, NOUNS[noun], plural)


@pytest.mark.parametrize(
    ("noun_phrase", "case", "german"),
    [
        (phrase("the", "man", "old"), "nominative", "der alte Mann"),
        (phrase("the", "man", "old"), "accusative", "den alten Mann"),
        (phrase("the", "man", "old"), "dative", "dem alten Mann"),
        (phrase("a", "man", "old"), "nominative", "ein alter Mann"),
        (phrase("a", "child", "small"), "accusative", "ein kleines Kind"),
        (phrase("my", "cat", "good"), "dative", "meiner guten Katze"),
        (phrase("this", "horse"), "dative", "diesem Pferd"),
        (phrase("the", "child", plural=True), "dative", "den Kindern"),
        (phrase("this", "woman", "young", plural=True), "dative", "diesen jungen Frauen"),
        (phrase("my", "apple", "big", plural=True), "accusative", "meine großen Äpfel"),
    ],
)
def test_articles_and_adjectives_agree(noun_phrase, case, german):
    assert noun_phrase.in_german(case) == german


def clause(verb: str, **fields) -> Clause:
    defaults = {
        "subject": phrase("the", "woman"),
        "verb": VERBS[verb],
        "accusative": phrase("the", "man") if verb == "pick up" else phrase("a", "book"),
        "dative": phrase("the", "child") if verb == "give" else None,
        "dative_first": True,
        "tense": "present",
        "modal": None,
        "negated": False,
    }
    return Clause(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("made", "arguments", "english", "german"),
    [
        (clause("pick up"), {}, "the woman picks up the man", "die Frau holt den Mann ab"),
        (clause("pick up"), {"subordinate": True}, "the woman picks up the man", "die Frau den Mann abholt"),
        (clause("pick up"), {"adverb": "heute"}, "the woman picks up the man", "heute holt die Frau den Mann ab"),
        (
            clause("pick up", tense="perfect", negated=True),
            {},
            "the woman has not picked up the man",
            "die Frau hat den Mann nicht abgeholt",
        ),
        (
            clause("give", tense="modal", modal=MODALS[2]),
            {"subordinate": True},
            "the woman wants to give the child a book",
            "die Frau dem Kind ein Buch geben will",
        ),
    ],
)
def test_the_verb_stands_where_german_wants_it(made, arguments, english, german):
    assert made.in_english() == english
    assert made.in_german(**arguments) == german


def test_both_english_orders_of_the_objects_are_one_german():
    first, second = clause("give"), clause("give", dative_first=False)
    assert first.in_english() == "the woman gives the child a book"
    assert second.in_english() == "the woman gives a book to the child"
    assert first.in_german() == second.in_german() == "die Frau gibt dem Kind ein Buch"


def test_positions_are_needed():
    """The same words in another order mean something else."""
    first = clause("pick up", subject=phrase("the", "dog"), accusative=phrase("the", "man"))
    second = clause("pick up", subject=phrase("the", "man"), accusative=phrase("the", "dog"))
    assert sorted(first.in_english().split()) == sorted(second.in_english().split())
    assert first.in_german() == "der Hund holt den Mann ab"
    assert second.in_german() == "der Mann holt den Hund ab"


def test_pairs_are_distinct_and_reproducible():
    pairs = generate_pairs(2000, seed=3)
    assert len({english for english, _ in pairs}) == 2000
    assert pairs == generate_pairs(2000, seed=3)
    assert pairs != generate_pairs(2000, seed=4)
    assert pairs[:500] == generate_pairs(500, seed=3)


def test_splits_share_no_sentence(tmp_path):
    files = write_demo_data(str(tmp_path), train=300, val=40, test=50)
    sentences = {split: paths[0].read_text().splitlines() for split, paths in files.items()}
    assert {split: len(lines) for split, lines in sentences.items()} == {"train": 300, "val": 40, "test": 50}
    assert len(set().union(*sentences.values())) == 390
    assert all(len(paths[1].read_text().splitlines()) == len(sentences[split]) for split, paths in files.items())
