"""The card of a parser: nothing in it translates, and its scores are not compared with the paper's."""

import json
import re
import shlex

import pytest
import yaml
from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig
from support.runs import train_argv
from training.cli import main
from training.data.trees import parse_tree
from training.publishing.deviations import deviations, papers_model
from training.publishing.records import Run


TREES = "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))\n(TOP (S (NP (NN rain)) (VP (VBZ falls)) (. .)))\n"


@pytest.fixture(scope="module")
def card_folder(tmp_path_factory):
    """Folder with a parser in `run`."""
    folder = tmp_path_factory.mktemp("parser")
    (folder / "gold.trees").write_text(TREES * 4, encoding="utf-8")
    trees = str(folder / "gold.trees")
    words = ["--max_steps", "2", "--eval_strategy", "no", "--target_lang", "trees", "--max_extra_tokens", "20"]
    assert main(train_argv({"train": [trees], "val": [trees]}, folder / "run", *words)) == 0
    return folder


@pytest.fixture(scope="module")
def card(card_folder) -> str:
    return write(card_folder)


def write(folder, *more: str, to=None) -> str:
    output = to or folder / "card"
    words = ["--checkpoint", str(folder / "run"), "--card-only", str(output), "--repo", "me/parser", *more]
    assert main(["publish", *words, "--example", "the dog barks ."]) == 0
    return (output / "README.md").read_text(encoding="utf-8")


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


def section(text: str, name: str) -> str:
    return text.split(f"<!-- hf-vaswani: {name} -->")[1].split(f"<!-- /hf-vaswani: {name} -->")[0]


@pytest.fixture
def test_set(card_folder, tmp_path):
    """Options of a command for two sentences and their gold trees."""
    (tmp_path / "val.words").write_text("the dog barks .\nrain falls .\n", encoding="utf-8")
    (tmp_path / "val.trees").write_text(TREES, encoding="utf-8")
    return ["--test-sources", str(tmp_path / "val.words"), "--test-references", str(tmp_path / "val.trees")]


def test_a_parsers_score_is_the_f1_of_the_trees_that_translate_writes(card_folder, test_set, tmp_path, capsys):
    text = write(card_folder, *test_set, to=tmp_path / "card")
    source, output = tmp_path / "val.words", tmp_path / "parsed"
    words = ["--model", str(card_folder / "run"), "--input", str(source), "--output", str(output), "--format", "tree"]
    assert main(["translate", *words]) == 0
    capsys.readouterr()
    references = ["--references", str(tmp_path / "val.trees"), "--metrics", "bracketing", "--bootstrap", "--json"]
    assert main(["score", "--hypotheses", str(output), *references]) == 0
    expected = json.loads(capsys.readouterr().out)
    metadata = yaml.safe_load(text.split("---")[1])
    [result] = metadata["model-index"][0]["results"]
    [metric] = result["metrics"]
    assert (metric["type"], metric["value"]) == ("f1", round(expected["score"], 2))
    assert metric["args"]["signature"] == expected["signature"] and metadata["metrics"] == ["f1"]
    assert result["dataset"]["name"] == "val"
    scores = section(text, "scores")
    for part in ("precision", "recall", "exact_match"):
        assert f"{part.replace('_', ' ')} {expected[part]:.2f}" in scores
    assert "trees mended: 0, missing: 0" in scores and "±" in scores and "bs:1000" in scores
    assert not re.search("BLEU|chrF|perplexity", scores)
    argv = shlex.split(re.search(r"Computed by `hf-vaswani (score [^`]*)`", scores)[1])
    replaced = {"me/parser": str(card_folder / "run"), "val.words": str(source), "val.trees": references[1]}
    assert main([replaced.get(word, word) for word in argv] + ["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"] == expected["figures"]


def test_a_parser_is_compared_with_another(card_folder, test_set, tmp_path):
    (tmp_path / "other.parsed").write_text(TREES, encoding="utf-8")
    text = write(card_folder, *test_set, "--baseline", str(tmp_path / "other.parsed"), to=tmp_path / "card")
    scores = section(text, "scores")
    assert re.search(r"\| other.parsed \| bracketing F1 \| 100.00 \| -\d+\.\d\d \|", scores)
    assert "--baseline other.parsed --metrics bracketing" in scores


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["--test-references", "{gold}", "{gold}"], "found 2 files"),
        (["--tokenized"], "--tokenized"),
        (["--test-references", "{words}"], "val.words:1: column 1"),
    ],
)
def test_a_test_set_that_is_none_for_a_parser_is_named(card_folder, test_set, tmp_path, capsys, more, found):
    files = {"gold": test_set[3], "words": test_set[1]}
    options = ["--checkpoint", str(card_folder / "run"), "--card-only", str(tmp_path / "card"), *test_set]
    assert main(["publish", *options, *(word.format(**files) for word in more)]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-vaswani publish: ")]
    assert found in line


def test_the_example_is_a_tree_over_its_words(card):
    sentence, tree = re.findall(r"^> (.+)$", section(card, "usage"), re.MULTILINE)
    assert sentence == "the dog barks ." and parse_tree(tree).words() == sentence.split()


def test_the_first_sentence_of_trees_with_traces_is_an_example_without_them(tmp_path):
    tree = "(TOP (S (NP-SBJ (DT the) (NN dog)) (VP (VBZ barks) (NP (-NONE- *))) (. .)))\n"
    (tmp_path / "gold.trees").write_text(tree * 8, encoding="utf-8")
    files = [str(tmp_path / "gold.trees")]
    words = ["--max_steps", "1", "--eval_strategy", "no", "--target_lang", "trees", "--strip_trees"]
    assert main(train_argv({"train": files, "val": files}, tmp_path / "run", *words)) == 0
    assert main(["publish", "--checkpoint", str(tmp_path / "run"), "--card-only", str(tmp_path / "card")]) == 0
    usage = section((tmp_path / "card" / "README.md").read_text(encoding="utf-8"), "usage")
    assert re.findall(r"^> (.+)$", usage, re.MULTILINE)[0] == "the dog barks ."


def test_the_data_section_tells_what_the_vocabulary_is(card):
    """S, NP, VP opened and closed; DT, NN, VBZ and the full stop."""
    data = section(card, "data")
    assert "Training trees: 8 " in data and "of the words of one language" in data
    assert "6 brackets and 4 tags is one token" in data and "both languages" not in data


def of_parser(
    config: VaswaniConfig, search: dict, checkpoints: int = 5, steps: int = 100_000, **values
) -> list[tuple]:
    same = {"source_lang": "en", "target_lang": "trees", "warmup_steps": 4000, **values}
    averaged = {"method": "mean of the weights", "checkpoints": [f"checkpoint-{i}" for i in range(checkpoints)]}
    run = Run({"global_step": steps}, {"must_match": same, "may_change": {}}, averaged)
    search = GenerationConfig(length_penalty_form="gnmt", **search)
    return deviations(run, config, search, papers_model(run, config, is_parser=True))


def test_the_papers_parser_differs_from_it_in_nothing_that_is_known():
    """Files have any name, so the card leaves the comparison of the data to its reader."""
    search = {"num_beams": 21, "length_penalty": 0.3, "max_extra_tokens": 300}
    for size in (16_000, 32_000):
        sizes = {"d_model": 1024, "encoder_layers": 4, "decoder_layers": 4}
        config = VaswaniConfig.from_table3("base", vocab_size=size, dropout=0.2, attention_dropout=0.2, **sizes)
        [row] = of_parser(config, search, learning_rate=0.001, tree_tags="XX")
        assert row[:2] == ("training data", "see above") and "Wall Street Journal" in row[2]


def test_what_differs_from_the_papers_parser_is_listed():
    sizes = {"d_model": 256, "d_ff": 1024, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.2}
    config = VaswaniConfig.from_table3("base", vocab_size=8000, **sizes)
    search = {"num_beams": 4, "length_penalty": 0.6, "max_extra_tokens": 50}
    rows = of_parser(config, search, 10, 50_000, learning_rate=0.0015, tree_tags="keep", warmup_steps=2000)
    assert [row for row in rows if row[0] != "training data"] == [
        ("d_model", "256", "1,024", "6.3"),
        ("d_ff", "1,024", "2,048", "6.3"),
        ("num_heads", "4", "8", "6.3"),
        ("encoder_layers", "3", "4", "6.3"),
        ("decoder_layers", "3", "4", "6.3"),
        ("vocabulary", "8,000", "16,000 (WSJ only) or 32,000 (semi-supervised)", "6.3"),
        ("tags of words", "predicted", "not stated; XX in Vinyals et al. (2015)", "6.3"),
        ("warmup_steps", "2,000", "4,000", "5.3"),
        ("updates", "50,000", "100,000", "5.2"),
        ("averaged checkpoints", "the last 10", "the last 5", "6.1"),
        ("num_beams", "4", "21", "6.3"),
        ("length_penalty", "0.6", "0.3", "6.3"),
        ("max_extra_tokens", "50", "300", "6.3"),
    ]


def test_the_card_compares_with_the_papers_parser(card):
    text = section(card, "deviations")
    assert "the paper's parser" in text and "| num\\_beams | 4 | 21 | 6.3 |" in text and "WMT14" not in text


@pytest.mark.parametrize(("metric", "title", "other"), [("f1", "bracketing F1", "BLEU"), ("bleu", "BLEU", "F1")])
def test_curves_show_f1_where_a_run_has_it(tmp_path, metric, title, other):
    pytest.importorskip("matplotlib")
    history = [{"step": 1, "loss": 5.0}, {"step": 2, "eval_loss": 4.0, f"eval_{metric}": 20.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    assert main(["curves", "--run", str(tmp_path), "--output", str(tmp_path / "curves.svg")]) == 0
    comments = drawn(tmp_path)
    assert title in comments and not [text for text in comments if other in text]


@pytest.mark.parametrize(
    ("history", "titles"),
    [
        ([{"step": 1, "loss": 5.0, "learning_rate": 0.1}], {"loss per token", "learning rate"}),
        ([{"step": 1, "eval_loss": 5.0}], {"loss per token"}),
        ([], {"loss per token"}),
    ],
)
def test_what_was_not_measured_is_not_drawn(tmp_path, history, titles):
    pytest.importorskip("matplotlib")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    assert main(["curves", "--run", str(tmp_path), "--output", str(tmp_path / "curves.svg")]) == 0
    assert {"loss per token", "BLEU", "bracketing F1", "learning rate"} & set(drawn(tmp_path)) == titles


def drawn(folder) -> list[str]:
    """Texts in a picture, which has them as comments."""
    return re.findall(r"<!-- (.*?) -->", (folder / "curves.svg").read_text(encoding="utf-8"))
