"""`hf-vaswani translate --format tree`: a line in, a tree over exactly its words out."""

import json
import re

import pytest
import torch

from support.killed_output import interrupted_after
from support.models import noisy_translator
from training.cli import main
from training.data.tokenizer import train_tokenizer, with_symbols
from training.data.trees import linearise, parse_tree


LINES = ["cats sleep", "the cat  sees\ta dog", "", "go", "a cat (dog) sees , and", "the dogs sleep again and again"]
WORDS = [line.replace("(", "-LRB-").replace(")", "-RRB-").split() for line in LINES]


@pytest.fixture(scope="module")
def tokenizer():
    words = train_tokenizer(LINES * 3, vocab_size=320, show_progress=False)
    return with_symbols(words, ["(S", ")S", "(NP", ")NP", "NN", ","])


@pytest.fixture(scope="module")
def parser(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parser")
    noisy_translator(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def command(parser, tmp_path):
    """Runs `hf-vaswani translate --format tree`, and gives the lines that it wrote; `None` if it failed."""
    source, output = tmp_path / "in.en", tmp_path / "out.trees"
    source.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")

    def run(*words, model=parser, text=None):
        if text is not None:
            source.write_text(text, encoding="utf-8")
        line = [
            "translate",
            "--model",
            str(model),
            "--input",
            str(source),
            "--output",
            str(output),
            "--format",
            "tree",
        ]
        return None if main([*line, *words]) else output.read_text(encoding="utf-8").split("\n")

    return run


def words_of(lines: list[str]) -> list[list[str]]:
    return [parse_tree(line).words() if line else [] for line in lines]


def report(caplog) -> str:
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Mended")]
    return line


@pytest.mark.parametrize("beams", ["1", "3"])
def test_every_line_becomes_a_tree_over_its_words(command, caplog, beams):
    *lines, end = command("--num-beams", beams)
    assert words_of(lines) == WORDS and end == ""
    assert report(caplog) == "Mended 0 of 5 trees."


def test_words_get_the_tags_that_they_have_in_given_trees(command, tmp_path):
    trees = tmp_path / "train.trees"
    for given, other in (("NN", ","), (",", "NN")):
        trees.write_text(f"(S ({given} cats) ({given} sleep))\n" * 5, encoding="utf-8")
        line, _ = command("--tag-lexicon", str(trees), "--num-beams", "4", text="cats sleep\n")
        assert f"({given} cats)" in line and f"({given} sleep)" in line and f"({other} " not in line


def test_another_lexicon_does_not_continue(command, tmp_path, capsys):
    trees = tmp_path / "train.trees"
    trees.write_text("(S (NN cats))\n" * 5, encoding="utf-8")
    words = ("--tag-lexicon", str(trees), "--window", "2")
    with interrupted_after(3):
        command(*words)
    capsys.readouterr()
    trees.write_text("(S (NN dogs))\n" * 5, encoding="utf-8")
    assert command(*words, "--resume") is None
    assert "tag_lexicon" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "text", "--tag-lexicon", __file__], "--tag-lexicon needs --format tree"),
        (["--unconstrained", "--tag-lexicon", __file__], "--unconstrained"),
        (["--tag-lexicon", "none.trees"], "none.trees"),
    ],
)
def test_a_lexicon_restricts_a_search_for_trees(command, capsys, words, message):
    try:
        assert command(*words) is None
    except SystemExit as stop:
        assert stop.code == 2
    assert message in capsys.readouterr().err


def test_the_words_of_trees_are_parsed(command, tmp_path):
    expected = command(text="cats sleep\nthe dogs sleep\n")
    trees = "(S (NN cats) (NN sleep))\n(TOP\n  (S (NP (DT the) (NN dogs))\n     (VBP sleep)))\n"
    (tmp_path / "gold.trees").write_text(trees, encoding="utf-8")
    assert command("--input", str(tmp_path / "gold.trees")) == expected


def test_unconstrained_outputs_are_mended_and_counted(command, caplog):
    *lines, _ = command("--unconstrained", "--num-beams", "1")
    assert words_of(lines) == WORDS
    mended = report(caplog)
    texts = [json.loads(line) for line in command("--num-beams", "1", "--format", "jsonl")[:-1]]
    symbols = [text["translations"][0]["text"] for text in texts if text["translations"]]
    malformed = sum(text.split() != linearise(parse_tree(line)) for text, line in zip(symbols, filter(None, lines)))
    assert malformed and re.fullmatch(rf"Mended {malformed} of 5 trees: \d+ missing words.*\.", mended)


def test_several_trees_make_an_n_best_list(command):
    rows = [line.split(" ||| ") for line in command("--n-best", "2")[:-1]]
    assert [row[0] for row in rows] == [str(number) for number in range(len(LINES)) for _ in range(2)]
    assert words_of([row[1] for row in rows]) == [words for words in WORDS for _ in range(2)]
    assert all(float(first[2]) >= float(second[2]) for first, second in zip(rows[::2], rows[1::2]))
    assert [row[1] for row in rows[::2]] == command()[:-1]


def test_an_ensemble_parses(command, parser, tokenizer, tmp_path):
    other = noisy_translator(tokenizer)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    lines = command("--model", str(parser), str(tmp_path / "other"))
    assert words_of(lines[:-1]) == WORDS
    assert lines != command()


@pytest.mark.parametrize("more", [(), ("--n-best", "2")])
def test_parsing_goes_on_after_an_interruption(command, tmp_path, capsys, more):
    expected = command("--window", "2", *more)
    with interrupted_after(3):
        command("--window", "2", *more)
    capsys.readouterr()
    assert command("--window", "2", *more, "--resume", "--unconstrained") is None
    assert "unconstrained (False, now True)" in capsys.readouterr().err
    assert command("--window", "2", *more, "--resume") == expected


@pytest.mark.slow
def test_processes_share_the_lines(command, capfd):
    expected = command()
    capfd.readouterr()
    assert command("--processes", "2") == expected
    assert "Mended 0 of 5 trees." in capfd.readouterr().err


def test_a_line_that_is_too_long_is_an_error_or_has_no_tree(command, tokenizer, capsys, caplog):
    limit = str(max(len(tokenizer(" ".join(words))["input_ids"]) for words in WORDS[:4]))
    assert command("--max-source-tokens", limit) is None
    error = capsys.readouterr().err
    assert "in.en:5: " in error and f"where {limit} are allowed" in error
    *lines, _ = command("--max-source-tokens", limit, "--skip-bad-lines", "--resume")
    assert words_of(lines) == [*WORDS[:4], [], []]
    assert "2 lines" in caplog.text and "(5, 6)" in caplog.text and report(caplog) == "Mended 0 of 3 trees."


def test_a_tree_needs_room_for_its_words(command, tokenizer, capsys):
    assert len(tokenizer("cats sleep")["input_ids"]) == 3
    assert command("--max-extra-tokens", "1", text="cats\ncats sleep\n") is None
    error = capsys.readouterr().err
    assert "in.en:2: a tree of 2 words has at least 5 tokens" in error and "at most 4" in error


@pytest.mark.parametrize("extra", [1, 9])
def test_the_room_beyond_the_source_is_an_option(command, tokenizer, extra):
    """Some output of the untrained model has no end."""
    lines = command("--max-extra-tokens", str(extra), "--num-beams", "1", "--format", "jsonl")
    outputs = [json.loads(line)["translations"] for line in lines[:-1]]
    longer = [
        len(output[0]["tokens"]) - len(tokenizer(line)["input_ids"]) for output, line in zip(outputs, LINES) if output
    ]
    assert max(longer) == extra


def test_a_translator_is_no_parser(command, tmp_path, capsys):
    words = train_tokenizer(LINES, vocab_size=270, show_progress=False)
    noisy_translator(words).save_pretrained(tmp_path / "translator")
    words.save_pretrained(tmp_path / "translator")
    for more in ((), ("--unconstrained",)):
        assert command(*more, model=tmp_path / "translator") is None
        [error] = [line for line in capsys.readouterr().err.split("\n") if line.startswith("hf-vaswani translate: ")]
        assert "translator: trees need a parser" in error


@pytest.mark.parametrize("limit", ["max_length", "max_new_tokens"])
def test_a_limit_of_the_checkpoint_that_takes_precedence_is_named(command, tokenizer, tmp_path, capsys, limit):
    folder = tmp_path / "limited"
    noisy_translator(tokenizer, **{limit: 30}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert command("--max-extra-tokens", "30", model=folder) is None
    assert f"generation_config.json: {limit}: expected none, found 30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--long-lines", "split"), "--long-lines split"),
        (("--target-prefix", __file__), "--target-prefix"),
        (("--engine", "ctranslate2"), "needs --unconstrained"),
        (("--format", "text", "--unconstrained"), "needs --format tree"),
        (("--max-extra-tokens", "0"), "at least 1, got 0"),
    ],
)
def test_options_that_exclude_each_other_are_named(command, capsys, words, found):
    with pytest.raises(SystemExit) as stop:
        command(*words)
    assert stop.value.code == 2 and found in capsys.readouterr().err
