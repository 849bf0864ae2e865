"""A header, and sides that look swapped, are named in a warning; nothing else is."""

import logging

import pytest

from training.data.pairs import load_pairs
from training.data.swapped_sides import dominant_script


PAIRS = {
    "en": ["The dog sleeps in the garden.", "It is a Dog.", "So so."],
    "de": ["Der Hund schläft im Garten.", "Es ist ein Hund.", "So so."],
    "ru": ["Собака спит в саду.", "Это собака.", "Так себе."],
    "el": ["Ο σκύλος κοιμάται στον κήπο.", "Είναι σκύλος.", "Έτσι κι έτσι."],
    "ja": ["犬は庭で眠っています。", "それは犬です。", "まあまあです。"],
    "zh": ["狗在花园里睡觉。它睡得很好。", "这是一只狗。", "马马虎虎。一般般。"],
    "ko": ["개가 정원에서 자고 있습니다.", "그것은 개입니다.", "그저 그렇습니다."],
    "sr": ["Pas spava u bašti.", "To je pas.", "Tako tako."],  # also written in Cyrillic
    "xx": ["Aa bb cc dd.", "Ee ff gg hh.", "Ii jj kk ll mm."],
}


def warnings_of(files, langs, caplog) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "training.data.pairs"):
        load_pairs([str(file) for file in files], *langs, streaming=True)
    return [record.getMessage() for record in caplog.records if record.name == "training.data.pairs"]


def write_tsv(path, *rows: str):
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("header", "langs"),
    [
        ("source\ttarget", ("en", "de")),
        ("src\ttrg", ("en", "de")),
        ("en\tde", ("en", "de")),
        ("DE\tEN ", ("en", "de")),
        ("en-US\tde-AT", ("en-US", "de-AT")),
        ("English\tGerman", ("en", "de")),
    ],
)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_header_is_named_by_file_and_line(tmp_path, caplog, header, langs, parallel):
    rows = [header, *(f"{source}\t{target}" for source, target in zip(PAIRS["en"], PAIRS["de"]))]
    files = [write_tsv(tmp_path / "a.tsv", *rows)]
    if parallel:
        files = [write_tsv(tmp_path / f"a.{i}", *(row.split("\t")[i] for row in rows)) for i in (0, 1)]
    [message] = warnings_of(files, langs, caplog)
    assert f"{files[0]}:1:" in message and all(repr(name) in message for name in header.split("\t"))


@pytest.mark.parametrize("row", ["so\tso", "no\tno", "it\tes", "in\tin", "German\tDeutsch", "The source.\tDas Ziel."])
def test_a_pair_of_short_words_is_no_header(tmp_path, caplog, row):
    assert warnings_of([write_tsv(tmp_path / "a.tsv", row, "A dog.\tEin Hund.")], ("en", "de"), caplog) == []


@pytest.mark.parametrize(
    "langs", [("en", "ru"), ("el", "de"), ("ru", "el"), ("ja", "ko"), ("zh", "en"), ("ru_RU", "de")]
)
def test_sides_of_different_scripts_that_are_swapped_are_named(tmp_path, caplog, langs):
    source, target = (PAIRS[lang[:2]] for lang in langs)
    swapped = write_tsv(tmp_path / "swapped.tsv", *map("\t".join, zip(target, source)))
    [message] = warnings_of([swapped], langs, caplog)
    assert str(swapped) in message and "swapped" in message
    assert warnings_of([write_tsv(tmp_path / "a.tsv", *map("\t".join, zip(source, target)))], langs, caplog) == []


@pytest.mark.parametrize("langs", [("en", "de"), ("ja", "zh"), ("sr", "en"), ("sr", "ru"), ("xx", "ru"), ("ru", "xx")])
@pytest.mark.parametrize("order", [1, -1])
def test_languages_that_share_a_script_or_have_several_give_no_warning(tmp_path, caplog, langs, order):
    sides = [PAIRS[lang] for lang in langs][::order]
    assert warnings_of([write_tsv(tmp_path / "a.tsv", *map("\t".join, zip(*sides)))], langs, caplog) == []


def test_the_dominant_script_needs_most_of_the_letters():
    assert dominant_script(["Собака крепко спит в саду и Dog."]) == "CYRILLIC"
    assert dominant_script(["Собака спит, a dog sleeps."]) is None
    assert dominant_script(["Dog 12345678901234567890!"]) is None
    assert dominant_script([]) is None
