import json

import pytest

from support.models import noisy_translator
from training.cli import main
from training.data.tokenizer import train_tokenizer, with_symbols
from training.evaluation.bracketing import Bracketing


# Brackets that count: S, NP, VP; S, NP, VP, NP; NP.
GOLD = [
    "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))",
    "(TOP (S (NP (PRP it)) (VP (VBZ sees) (NP (NN fish)))))",
    "(TOP (NP (NN results)))",
]


def details(predictions: list[str], gold: list[str] = GOLD) -> dict:
    result = Bracketing().corpus_score(predictions, [gold])
    return {"f1": result.score, **result.details}


def test_equal_trees_have_an_f1_of_100():
    found = details(GOLD)
    assert (found["f1"], found["precision"], found["recall"], found["exact_match"]) == (100, 100, 100, 100)
    assert (found["matched"], found["gold"], found["predicted"]) == (8, 8, 8)
    assert (found["mended"], found["missing"]) == (0, 0)


def test_scores_by_hand():
    """S, NP of 3 predicted; S, NP, VP of 4, as the last NP spans other words; the third tree is right."""
    predictions = [
        "(S (NP (DT the) (NN dog)) (NP (VBZ barks)) (. .))",
        "(S (NP (PRP it)) (VP (NP (VBZ sees)) (NN fish)))",
        "(NP (NN results))",
    ]
    found = details(predictions)
    assert (found["matched"], found["gold"], found["predicted"]) == (6, 8, 8)
    assert found["f1"] == found["precision"] == found["recall"] == pytest.approx(75)
    assert found["exact_match"] == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    "line", ["", "   ", "(S (NP (DT the) (NN dog)", "(S (DT the) (NN cat) (VBZ barks) (. .))", "()"]
)
def test_a_missing_tree_is_not_left_out(line):
    """EVALB skips it, and would report an F1 of 100 here."""
    found = details([line, *GOLD[1:]])
    own = line.count("(S (DT")  # brackets of the tree over other words
    assert (found["matched"], found["gold"], found["predicted"]) == (5, 8, 5 + own)
    assert found["recall"] == pytest.approx(100 * 5 / 8) and found["f1"] == pytest.approx(200 * 5 / (8 + 5 + own))
    assert (found["missing"], found["mended"]) == (1, 0)
    assert found["exact_match"] == pytest.approx(200 / 3)


def test_without_any_tree_the_score_is_0():
    found = details([""] * 3)
    assert (found["f1"], found["precision"], found["recall"], found["missing"]) == (0, 0, 0, 3)


def test_symbols_are_restored_over_the_gold_words_and_mended_ones_counted():
    whole = "(S (NP DT NN )NP (VP VBZ )VP . )S"
    cut = "(S (NP DT NN )NP (VP VBZ"  # VP would hold the full stop at most, which does not count
    for symbols, mended in ((whole, 0), (cut, 1)):
        found = details([symbols, *GOLD[1:]])
        assert (found["f1"], found["mended"], found["missing"]) == (100, mended, 0)


def test_one_gold_tree_for_each_sentence():
    with pytest.raises(ValueError, match="one gold tree, got 2"):
        Bracketing().corpus_score(GOLD, [GOLD, GOLD])


@pytest.fixture
def files(tmp_path):
    texts = {
        "gold.trees": GOLD * 10,
        "half": [*GOLD[:1], "(S (NP (PRP it) (VBZ sees)) (NN fish))", *GOLD[2:]] * 10,
        "bad": ["(S (DT the) (NN dog) (VBZ barks) (. .))", "", ""] * 10,
    }
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path


def score(files, system: str, *more: str) -> int:
    words = ["--hypotheses", str(files / system), "--references", str(files / "gold.trees"), "--metrics", "bracketing"]
    return main(["score", *words, *more])


def test_the_command_reports_f1_its_parts_and_signature(files, capsys):
    """In ten times three trees: S, NP, VP; S; NP of 3 + 2 + 1 predicted and 3 + 4 + 1 gold brackets."""
    assert score(files, "half") == 0
    output = capsys.readouterr().out
    assert f"{200 * 5 / 14:.2f}" in output and "rules:evalb-collins|punctuation:gold-tags|left-out:none" in output
    assert f"precision {100 * 5 / 6:.2f}, recall {100 * 5 / 8:.2f}, exact match {200 / 3:.2f}%" in output
    assert "50 of 60 predicted and 80 gold brackets" in output and "mended: 0, missing: 0" in output

    assert score(files, "bad", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["missing"], report["empty"]) == ("bracketing F1", 20, 20)
    assert report["score"] == pytest.approx(200 * 1 / (8 + 1))


def test_the_command_gives_intervals_and_paired_tests(files, capsys):
    """Of equal scores, no interval is wide, and no difference is significant."""
    options = ["--json", "--bootstrap", "200", "--paired-bootstrap", "200", "--paired-randomization", "200"]
    assert score(files, "half", *options, "--baseline", str(files / "bad"), str(files / "half")) == 0
    report = json.loads(capsys.readouterr().out)
    interval = report["figures"][0]["interval"]
    assert interval["mean"] == pytest.approx(report["score"], abs=3) and 2 < interval["half_width"] < 15
    worse, same = report["comparisons"]
    assert worse["baseline_score"] == pytest.approx(200 / 9) and max(worse["p_values"].values()) < 0.01
    assert same["p_values"] == {"bootstrap": 1.0, "randomization": 1.0}
    assert "bs:200" in worse["signatures"]["bootstrap"]


def test_a_broken_gold_tree_names_its_file_and_line(files, capsys):
    lines = (files / "gold.trees").read_text().splitlines()
    (files / "gold.trees").write_text("\n".join([*lines[:4], "(S (NP (NN a))", *lines[5:]]) + "\n")
    assert score(files, "half") == 1
    assert f"{files / 'gold.trees'}:5: column 1: " in capsys.readouterr().err


@pytest.mark.parametrize("references", [["--test-set", "wmt14/en-de"], ["--references", "a", "b"]])
def test_the_command_needs_one_file_of_gold_trees(references, capsys):
    with pytest.raises(SystemExit) as error:
        main(["score", "--hypotheses", "a", "--metrics", "bracketing", *references])
    assert error.value.code == 2 and "one file of trees" in capsys.readouterr().err


WORDS = ["the dog barks .", "it sees fish", "results"]


@pytest.fixture(scope="module")
def parser(tmp_path_factory):
    """A parser that writes any symbols."""
    folder = tmp_path_factory.mktemp("parser")
    words = train_tokenizer(WORDS * 3, vocab_size=280, show_progress=False)
    tokenizer = with_symbols(words, ["(S", ")S", "(NP", ")NP", "(VP", ")VP", "NN", "VBZ", "."])
    noisy_translator(tokenizer, num_beams=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def parsing(files, parser):
    """Words of a command that parses the sources and scores the trees."""
    (files / "words").write_text("".join(f"{line}\n" for line in WORDS * 10), encoding="utf-8")
    words = ["score", "--model", str(parser), "--sources", str(files / "words"), "--metrics", "bracketing"]
    return [*words, "--references", str(files / "gold.trees")]


def test_a_parser_is_scored_by_the_trees_that_it_writes_by_the_translate_command(files, parser, parsing, capsys):
    """With the beam and the room of its checkpoint, and no perplexity of trees, which it does not write."""
    assert main([*parsing, "--json", "--output", str(files / "own")]) == 0
    own = json.loads(capsys.readouterr().out)
    trees = {}
    for beams in ([], ["--num-beams", "1"]):
        words = ["--input", str(files / "words"), "--output", str(files / "parsed"), "--format", "tree", *beams]
        assert main(["translate", "--model", str(parser), *words]) == 0
        trees[len(beams)] = (files / "parsed").read_text(encoding="utf-8")
        if not beams:
            assert score(files, "parsed", "--json") == 0
    assert (files / "own").read_text(encoding="utf-8") == trees[0] != trees[2]
    expected = json.loads(capsys.readouterr().out)
    assert own["figures"] == expected["figures"] and own["gold"] == 80 and own["predicted"] > 0
    assert (own["missing"], own["mended"], own["empty"], own["sentences"]) == (0, 0, 0, 30)


def test_the_words_of_trees_are_parsed(files, parsing, tmp_path, capsys):
    assert main([*parsing, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    trees = [" ".join(f"(NN {word})" for word in line.split()) for line in WORDS * 10]
    (tmp_path / "in.trees").write_text("".join(f"(TOP (S {words}))\n" for words in trees), encoding="utf-8")
    assert main([*parsing, "--sources", str(tmp_path / "in.trees"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"] == expected["figures"]
    (tmp_path / "in.trees").write_text("(S (NN results))\n" * 29 + "(S (NN results)\n", encoding="utf-8")
    assert main([*parsing, "--sources", str(tmp_path / "in.trees")]) == 1
    assert f"{tmp_path / 'in.trees'}:30: column 1: the text ends" in capsys.readouterr().err


def test_what_cannot_be_parsed_is_named(files, parsing, tmp_path, capsys):
    words = train_tokenizer(WORDS, vocab_size=270, show_progress=False)
    noisy_translator(words).save_pretrained(tmp_path / "translator")
    words.save_pretrained(tmp_path / "translator")
    assert main([*parsing, "--model", str(tmp_path / "translator")]) == 1
    assert "translator: trees need a parser" in capsys.readouterr().err

    parser = train_tokenizer([f"{word} " * 4 for word in WORDS], vocab_size=400, show_progress=False)
    parser = with_symbols(parser, ["(S", ")S", "NN"])
    noisy_translator(parser, max_extra_tokens=1).save_pretrained(tmp_path / "short")
    parser.save_pretrained(tmp_path / "short")
    assert main([*parsing, "--model", str(tmp_path / "short")]) == 1
    assert f"{files / 'words'}:1: a tree of 4 words has at least 7 tokens" in capsys.readouterr().err

    with pytest.raises(SystemExit) as stop:
        main([*parsing, "--hypotheses", str(files / "half")])
    assert stop.value.code == 2 and "--hypotheses" in capsys.readouterr().err
