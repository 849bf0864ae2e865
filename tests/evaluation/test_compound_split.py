"""The expectations are written by hand from what the published scripts do; Moses' own Perl gives the same."""

import pytest
import sacrebleu

from training.evaluation.compound_split import CompoundSplitBLEU, moses_tokenize, plain_punctuation, split_compounds


GERMAN = {
    "Ein Hund, zwei Katzen.": "Ein Hund , zwei Katzen .",
    "Er sagte: „Ja, z.B. heute“.": "Er sagte : &quot; Ja , z.B. heute &quot; .",
    "Das ist’s.": "Das ist &apos; s .",
    "Am 3. Mai kamen 1.000 Leute, 3,5 Mio. mehr.": "Am 3. Mai kamen 1.000 Leute , 3,5 Mio. mehr .",
    "Ende. Anfang": "Ende . Anfang",
    "Ende. anfang": "Ende. anfang",  # a small letter follows: taken for an abbreviation
    "Dr. Weiß wohnt bei Dr.": "Dr. Weiß wohnt bei Dr .",  # the last word ends the sentence
    "Na...gut…": "Na ... gut ...",
    "R&B [live] a|b <x>": "R &amp; B &#91; live &#93; a &#124; b &lt; x &gt;",
    "50% von 10€, 1,": "50 % von 10 € , 1 ,",
    "a\u00a0b\tc\x07d": "a b cd",
    "１２：３０！": "12 : 30 !",
    "ein rot-weißes Auto - ja": "ein rot-weißes Auto - ja",
    "": "",
}
ENGLISH = {
    "It's the 1990's, isn't it?": "It &apos;s the 1990 &apos;s , isn &apos;t it ?",
    "The dogs' bowl": "The dogs &apos; bowl",
    "No. 5 said No. Way": "No. 5 said No . Way",  # an abbreviation before numbers alone
    "The U.S. Army": "The U.S. Army",
    "He said 'no.'": "He said &apos; no . &apos;",
    "Am 3. Mai": "Am 3 . Mai",
}


@pytest.mark.parametrize(("text", "expected"), GERMAN.items())
def test_german_words_are_those_of_moses(text, expected):
    assert moses_tokenize(plain_punctuation(text)) == expected


@pytest.mark.parametrize(("text", "expected"), ENGLISH.items())
def test_english_words_are_those_of_moses(text, expected):
    assert moses_tokenize(plain_punctuation(text), "en") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("rot-weiß-blau", "rot ##AT##-##AT## weiß ##AT##-##AT## blau"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # the b is used up by the first match
        ("a-ü-c", "a ##AT##-##AT## ü ##AT##-##AT## c"),  # two bytes: one for each match
        ("ja--nein", "ja ##AT##-##AT## -nein"),
        ("so - oder -so", "so - oder -so"),
    ],
)
def test_what_a_hyphen_joins_is_split(text, expected):
    assert split_compounds(text) == expected


def test_bleu_by_hand():
    """Ten words, of which the eighth is wrong: 9 of 10, 7 of 9 pairs, 5 of 8 triples, 4 of 7 quadruples."""
    hypothesis, reference = (f"Der alte Mann sieht ein rot-{colour}es Auto." for colour in ("blau", "weiß"))
    metric = CompoundSplitBLEU("de")
    result = metric.corpus_score([hypothesis], [[reference]])
    assert result.precisions == pytest.approx([90, 700 / 9, 62.5, 400 / 7])
    assert result.score == pytest.approx(100 * (9 / 10 * 7 / 9 * 5 / 8 * 4 / 7) ** 0.25)
    assert result.score > sacrebleu.corpus_bleu([hypothesis], [[reference]]).score
    assert "tok:moses-de+atat|smooth:none" in str(metric.get_signature())


def test_nothing_is_smoothed():
    texts = ["ein roter Hund läuft"], [["ein roter Mann läuft"]]
    assert CompoundSplitBLEU("de").corpus_score(*texts).score == 0 < sacrebleu.corpus_bleu(*texts).score


def test_quotes_do_not_count():
    result = CompoundSplitBLEU("de").corpus_score(["„Komm jetzt her“, sagt er."], [['"Komm jetzt her", sagt er.']])
    assert result.score == pytest.approx(100)


def test_tokenised_text_is_only_split():
    """Six words as they are, of which one becomes three."""
    result = CompoundSplitBLEU(None).corpus_score(["so , rot-weiß z.B. &quot; ."], [["so , rot-weiß z.B. &quot; ."]])
    assert result.sys_len == 8
    assert result.score == pytest.approx(100)


def test_case_is_ignored_after_the_words_are_known():
    """Before a small letter the full stop would stay."""
    result = CompoundSplitBLEU("de", lowercase=True).corpus_score(["Gut. Ja so EIN Tag"], [["gut . ja So ein tag"]])
    assert result.sys_len == 6
    assert result.score == pytest.approx(100)


def test_an_unknown_language_is_named():
    with pytest.raises(ValueError, match=r"languages de, en, got 'fr'"):
        CompoundSplitBLEU("fr")
