"""The card of a parser: nothing in it translates, and its scores are not compared with the paper's."""

import json
import re

import pytest
import yaml

from support.runs import train_argv
from training.cli import main


TREES = "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))\n(TOP (S (NP (NN rain)) (VP (VBZ falls)) (. .)))\n"


@pytest.fixture(scope="module")
def card(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("parser")
    (folder / "gold.trees").write_text(TREES * 4, encoding="utf-8")
    trees = str(folder / "gold.trees")
    words = ["--max_steps", "2", "--eval_strategy", "no", "--target_lang", "trees", "--max_extra_tokens", "20"]
    assert main(train_argv({"train": [trees], "val": [trees]}, folder / "run", *words)) == 0
    return write(folder)


def write(folder, *more: str) -> str:
    words = ["--checkpoint", str(folder / "run"), "--card-only", str(folder / "card"), "--repo", "me/parser", *more]
    assert main(["publish", *words, "--example", "the dog barks ."]) == 0
    return (folder / "card" / "README.md").read_text(encoding="utf-8")


def test_a_parser_is_not_called_a_translator(card):
    assert "phrase structure tree" in card and "does not translate between languages" in card
    assert "hf-vaswani translate --model me/parser --format tree" in card
    rest = card.replace("does not translate between languages", "").replace("hf-vaswani translate", "")
    assert not re.search(r"(translates |translating |translation)", rest.split("## Scores")[0], re.IGNORECASE)


def test_its_metadata_name_one_language_and_no_translation(card):
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["language"] == ["en"] and "pipeline_tag" not in metadata


def test_its_scores_are_not_comparable_with_the_papers(card, tmp_path, capsys):
    gold, run = tmp_path / "gold.trees", tmp_path / "run"
    gold.write_text(TREES, encoding="utf-8")
    words = ["--max_steps", "2", "--eval_strategy", "no", "--target_lang", "trees"]
    assert main(train_argv({"train": [str(gold)], "val": [str(gold)]}, run, *words)) == 0
    capsys.readouterr()
    assert (
        main(["score", "--hypotheses", str(gold), "--references", str(gold), "--metrics", "bracketing", "--json"]) == 0
    )
    (tmp_path / "scores.json").write_text(capsys.readouterr().out, encoding="utf-8")
    text = write(tmp_path, "--scores", f"{tmp_path / 'scores.json'}")
    assert re.search(r"91\.3 .* cannot be compared", text) and "CRAFT" in text
    [result] = yaml.safe_load(text.split("---")[1])["model-index"][0]["results"]
    assert (result["task"]["name"], result["task"]["type"]) == ("Constituency parsing", "other")
    assert result["metrics"][0]["value"] == 100 and result["metrics"][0]["type"] == "f1"


def test_a_malformed_bracketing_score_names_its_field(card, tmp_path, capsys):
    figure = {"name": "bracketing F1", "score": 1.0, "signature": "s", "interval": None, "note": "", "digits": 2}
    report = {"system": "s", "sentences": 1, "empty": 0, "comparisons": []}
    report["figures"] = [{**figure, "details": {"exact_match": "all"}}]
    (tmp_path / "scores.json").write_text(json.dumps(report), encoding="utf-8")
    assert main(["publish", "--checkpoint", "x", "--card-only", "y", "--scores", str(tmp_path / "scores.json")]) == 1
    assert "scores.json" in capsys.readouterr().err
