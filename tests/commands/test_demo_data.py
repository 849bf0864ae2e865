import hashlib

import pytest

from training.demo_data import (
    ADJECTIVES,
    MODALS,
    PEOPLE,
    THINGS,
    Clause,
    NounPhrase,
    Verb,
    generate_aligned_pairs,
    generate_pairs,
    join,
    links_between,
    write_demo_data,
)


NOUNS = {noun.english: noun for noun in PEOPLE + THINGS}
VERBS = {
    "pick up": Verb("pick up", "picks up", "picked up", "holt", "holen", "abholen", "abgeholt", "ab"),
    "look for": Verb("look for", "looks for", "looked for", "sucht", "suchen", "suchen", "gesucht"),
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
    assert join(noun_phrase.in_german(case, "subject")) == german


def clause(verb: str, **fields) -> Clause:
    defaults = {
        "subject": phrase("the", "woman"),
        "verb": VERBS[verb],
        "accusative": phrase("a", "book") if verb == "give" else phrase("the", "man"),
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
    assert join(made.in_english()) == english
    assert join(made.in_german(**arguments)) == german


def test_both_english_orders_of_the_objects_are_one_german():
    first, second = clause("give"), clause("give", dative_first=False)
    assert join(first.in_english()) == "the woman gives the child a book"
    assert join(second.in_english()) == "the woman gives a book to the child"
    assert join(first.in_german()) == join(second.in_german()) == "die Frau gibt dem Kind ein Buch"


def test_positions_are_needed():
    """The same words in another order mean something else."""
    first = clause("pick up", subject=phrase("the", "dog"), accusative=phrase("the", "man"))
    second = clause("pick up", subject=phrase("the", "man"), accusative=phrase("the", "dog"))
    assert sorted(join(first.in_english()).split()) == sorted(join(second.in_english()).split())
    assert join(first.in_german()) == "der Hund holt den Mann ab"
    assert join(second.in_german()) == "der Mann holt den Hund ab"


@pytest.mark.parametrize(
    ("made", "arguments", "sure", "possible"),
    [
        (clause("pick up"), {}, "the-die woman-Frau picks-holt up-ab the-den man-Mann", "picks-ab up-holt"),
        (
            clause("pick up", tense="perfect", negated=True),
            {"subordinate": True},
            "the-die woman-Frau has-hat not-nicht picked-abgeholt up-abgeholt the-den man-Mann",
            "",
        ),
        (
            clause("look for", negated=True),
            {},
            "the-die woman-Frau not-nicht look-sucht the-den man-Mann",
            "does-sucht for-sucht",
        ),
        (
            clause("give", tense="modal", modal=MODALS[2], dative_first=False),
            {"adverb": "am Abend"},
            "the-die woman-Frau wants-will give-geben a-ein book-Buch the-dem child-Kind",
            "to-will to-geben to-dem",
        ),
    ],
)
def test_words_are_linked_to_their_translation(made, arguments, sure, possible):
    english, german = made.in_english(), made.in_german(**arguments)
    links = [(f"{english[i].text}-{german[j].text}", is_sure) for i, j, is_sure in links_between(english, german)]
    assert sorted(link for link, is_sure in links if is_sure) == sorted(sure.split())
    assert sorted(link for link, is_sure in links if not is_sure) == sorted(possible.split())


def test_links_count_the_words_of_the_sentence():
    """Adverbs, conjunctions and both clauses, each with words of the same meaning."""
    pairs = {english: (german, links) for english, german, links in generate_aligned_pairs(25)}
    german, links = pairs["In the evening the man looks at the chairs."]
    assert german == "Am Abend schaut der Mann die Stühle an."
    assert links == "0-0 1-0 2-1 3-3 4-4 5-2 5?7 6?2 6-7 7-5 8-6"
    german, links = pairs["The cat has picked up a lamp while the big woman has not shown the small man the old book."]
    assert german.startswith("Die Katze hat eine Lampe abgeholt, während die große Frau dem kleinen Mann")
    first, second = "0-0 1-1 2-2 3-5 4-5 5-3 6-4", "8-7 9-8 10-9 11-18 12-16 13-17 14-10 15-11 16-12 17-13 18-14 19-15"
    assert links == f"{first} 7-6 {second}"


def test_every_word_of_both_sentences_has_a_link():
    for english, german, links in generate_aligned_pairs(500, seed=5):
        for side, text in enumerate((english, german)):
            linked = {int(link.replace("?", "-").split("-")[side]) for link in links.split()}
            assert linked == set(range(len(text.split()))), (english, german, links)


def test_a_seed_keeps_its_sentences():
    """Checkpoints and figures refer to them: the digest is older than the alignments."""
    text = "".join(f"{english}\n{german}\n" for english, german in generate_pairs(2000, seed=3))
    digest = "4e25c8e86958673456b60583147912d5835624f88703039b30f3b9f0ea746ee0"
    assert hashlib.sha256(text.encode()).hexdigest() == digest


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
    assert all(len(path.read_text().splitlines()) == len(sentences[split]) for split in files for path in files[split])
    gold = files["test"][0].with_suffix(".align")
    pairs = zip(*(path.read_text().splitlines() for path in [*files["test"], gold]))
    assert list(pairs) == generate_aligned_pairs(390)[:50]
