"""Training a parser on a toy treebank."""

import json
import random
from typing import NamedTuple

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from support.runs import train_argv
from training.cli import main
from training.data.tokenizer import symbol_ids, train_tokenizer
from training.data.trees import parse_tree
from training.trainer.trainer import bracket_f1


NOUNS, VERBS = ["dog", "cat", "bird", "horse"], ["sees", "likes", "chases"]


class Toy(NamedTuple):
    """A sentence of a toy grammar, as a tree, as its words and as its symbols."""

    tree: str
    words: str
    symbols: str


def noun_phrase(rng: random.Random) -> Toy:
    def simple() -> Toy:
        noun = rng.choice(NOUNS)
        return Toy(f"(NP (DT the) (NN {noun}))", f"the {noun}", "(NP DT NN )NP")

    first, second = simple(), simple()
    if rng.random() < 0.6:
        return first
    return Toy(
        f"(NP {first.tree} (PP (IN near) {second.tree}))",
        f"{first.words} near {second.words}",
        f"(NP {first.symbols} (PP IN {second.symbols} )PP )NP",
    )


def sentence(rng: random.Random) -> Toy:
    """Subject, verb and object, each noun phrase with up to one prepositional phrase."""
    left, verb, right = noun_phrase(rng), rng.choice(VERBS), noun_phrase(rng)
    return Toy(
        f"(TOP (S {left.tree} (VP (VBZ {verb}) {right.tree}) (. .)))",
        f"{left.words} {verb} {right.words} .",
        f"(S {left.symbols} (VP VBZ {right.symbols} )VP . )S",
    )


RNG = random.Random(1)
TOYS = {name: [sentence(RNG) for _ in range(count)] for name, count in (("train", 200), ("val", 20))}


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    for name, toys in TOYS.items():
        (folder / f"{name}.trees").write_text("".join(f"{toy.tree}\n" for toy in toys), encoding="utf-8")
    return {name: [str(folder / f"{name}.trees")] for name in TOYS}


SEARCH = ["--num_beams", "3", "--length_penalty", "0.3", "--max_extra_tokens", "30"]


@pytest.fixture(scope="module")
def run(trees, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert main(train_argv(trees, output, "--max_steps", "4", "--eval_f1", "--max_length", "31", *SEARCH)) == 0
    return output


def test_each_symbol_of_the_training_trees_is_a_token(run):
    tokenizer = AutoTokenizer.from_pretrained(run)
    phrases = {"S", "NP", "VP", "PP"}
    brackets = {f"({label}" for label in phrases} | {f"){label}" for label in phrases}
    assert symbol_ids(tokenizer).keys() == brackets | {"DT", "NN", "VBZ", "IN", "."}
    ids = tokenizer("(S (NP DT NN )NP (VP VBZ (NP DT NN )NP )VP . )S")["input_ids"]
    assert len(ids) == 15  # with the end token
    assert len(tokenizer) <= 300


def test_the_search_of_the_recipe_is_in_the_checkpoint(run):
    for folder in (run, run / "checkpoint-4"):
        search = AutoModelForSeq2SeqLM.from_pretrained(folder).generation_config
        assert (search.num_beams, search.length_penalty, search.max_extra_tokens) == (3, 0.3, 30)
        assert search.length_penalty_form == "gnmt"


def test_f1_is_evaluated_and_selects_the_best_checkpoint(run):
    state = json.loads((run / "trainer_state.json").read_text())
    [entry] = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert 0 <= entry["eval_f1"] <= 100 and "eval_bleu" not in entry
    assert state["best_metric"] == entry["eval_f1"]


def test_a_resumed_run_has_the_same_trees(run, trees, capsys):
    words = train_argv(trees, run, "--max_steps", "6", "--eval_f1", "--max_length", "31", *SEARCH, "--resume")
    for change, message in (
        (["--tree_tags", "XX"], "tree_tags (keep, now XX)"),
        (["--strip_trees"], "strip_trees (False, now True)"),
        (["--tree_weights", "2"], "tree_weights ([], now ['2'])"),
        (["--num_beams", "4"], "num_beams (3, now 4)"),
    ):
        assert main([*words, *change]) == 1
        assert message in capsys.readouterr().err


def test_pairs_that_are_too_long_are_counted(trees, tmp_path, caplog):
    caplog.set_level("INFO")
    kept = sum(len(toy.symbols.split()) + 1 <= 20 for toy in TOYS["train"])  # with the end token
    assert 0 < kept < 200
    assert main(train_argv(trees, tmp_path, "--max_steps", "1", "--eval_strategy", "no", "--max_length", "20")) == 0
    assert f"Training data: {kept} of 200 pairs kept; dropped: 0 empty, {200 - kept} too long" in caplog.text


def test_the_next_command_gives_trees(trees, tmp_path, capsys):
    words = ["--max_steps", "1", "--eval_strategy", "no", "--target_lang", "trees", "--average", "last"]
    assert main(train_argv(trees, tmp_path, *words)) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.endswith(f"--input FILE --output {tmp_path}/translations.trees --format tree")


def test_f1_needs_trees(data, trees, tmp_path, capsys):
    assert main(train_argv(data, tmp_path / "a", "--max_steps", "1", "--eval_f1")) == 1
    assert "eval_f1: expected .trees files as eval_files" in capsys.readouterr().err
    assert main(train_argv({**trees, "val": data["val"]}, tmp_path / "b", "--max_steps", "1", "--eval_f1")) == 1
    assert "eval_f1: expected .trees files as eval_files" in capsys.readouterr().err


def test_f1_by_hand():
    """S, NP, VP of the first tree are right, its NP of the object is not there; the second has no tree."""
    gold = [
        "(S (NP (PRP it)) (VP (VBZ sees) (NP (NN fish))))",
        "(S (NP (NN rain)) (VP (VBZ falls)))",
    ]
    trees = ["(S (NP (PRP it)) (VP (VBZ sees) (NN fish)))", ""]
    assert bracket_f1(trees, gold) == pytest.approx(200 * 3 / (4 + 3 + 3 + 0))
    assert bracket_f1(["", ""], gold) == 0


def test_outputs_are_compared_with_their_own_trees(run, trees, tmp_path, monkeypatch):
    """Devices and batches reorder sentences; perfect trees for each source give 100."""
    perfect = {toy.words: toy.tree for toy in TOYS["val"]}
    monkeypatch.setattr(
        "training.trainer.trainer.parse", lambda model, tok, sources, *a, **k: [perfect[text] for text in sources]
    )
    assert main(train_argv(trees, tmp_path, "--max_steps", "4", "--eval_f1")) == 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [entry["eval_f1"] for entry in history if "eval_f1" in entry] == [100.0]


def test_evaluation_parses_as_the_command_does(trees, tmp_path, monkeypatch):
    """The search of an untrained model would leave the well-formed trees at once."""
    evaluated = []
    monkeypatch.setattr("training.trainer.trainer.bracket_f1", lambda trees, golds: evaluated.append(trees) or 50.0)
    words = train_argv(trees, tmp_path / "run", "--max_steps", "4", "--eval_f1", *SEARCH)
    limit = words.index("--generation_max_length")
    assert main([*words[:limit], *words[limit + 2 :]]) == 0  # trees of any length, as in the command
    source, output = tmp_path / "val.words", tmp_path / "val.parsed"
    source.write_text("".join(f"{toy.words}\n" for toy in TOYS["val"]), encoding="utf-8")
    model = str(tmp_path / "run" / "checkpoint-4")
    words = ["--input", str(source), "--output", str(output), "--format", "tree", "--num-beams", "1"]
    assert main(["translate", "--model", model, *words]) == 0
    assert evaluated == [output.read_text(encoding="utf-8").splitlines()]
    assert [parse_tree(tree).words() for tree in evaluated[0]] == [toy.words.split() for toy in TOYS["val"]]


def test_a_tree_without_room_is_missing_and_does_not_stop_the_training(trees, tmp_path, caplog):
    words = ["--max_steps", "4", "--eval_f1", "--generation_max_length", "4"]  # a tree of six words has nine symbols
    assert main(train_argv(trees, tmp_path, *words)) == 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [entry["eval_f1"] for entry in history if "eval_f1" in entry] == [0.0]
    assert "20 lines of evaluation set" in caplog.text


def test_f1_needs_a_parser_from_the_start(trees, tmp_path, capsys):
    words = [word for toy in TOYS["train"] for word in toy.words.split()]
    train_tokenizer(words, vocab_size=280, show_progress=False).save_pretrained(tmp_path / "words")
    options = ["--max_steps", "4", "--eval_f1", "--tokenizer_from", str(tmp_path / "words")]
    assert main(train_argv(trees, tmp_path / "run", *options)) == 1
    assert "need a parser" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow
def test_a_toy_grammar_is_learned(trees, tmp_path):
    model = '{"d_model": 64, "d_ff": 128, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.1}'
    words = ["--model_overrides", model, "--max_steps", "400", "--warmup_steps", "100", "--eval_steps", "400"]
    assert main(train_argv(trees, tmp_path, *words, "--save_steps", "400", "--eval_f1")) == 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [entry["eval_f1"] for entry in history if "eval_f1" in entry][-1] > 95
