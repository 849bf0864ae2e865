"""Scoring with a model: translations, perplexity, COMET."""

import json
import math
import re
import sys

import pytest
import sacrebleu
import torch

from support.models import noisy_translator
from training.cli import main
from training.evaluation.metrics import MetricScore, ratio_interval
from training.evaluation.perplexity import perplexities
from training.evaluation.report import Report, as_json
from training.inference.translation import translate


@pytest.fixture(scope="module")
def files(tokenizer, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    noisy_translator(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for side, name in enumerate(("src", "ref")):
        (folder / name).write_text("".join(pair[side] + "\n" for pair in pairs[:12]), encoding="utf-8")
    (folder / "hyp").write_text("".join(pair[1].upper() + "\n" for pair in pairs[:12]), encoding="utf-8")
    return folder


def words(files, *names: str) -> list[str]:
    known = {"hypotheses": "hyp", "references": "ref", "sources": "src", "model": "model"}
    return ["score", "--json", *(word for n in names for word in (f"--{n}", str(files / known[n])))]


@torch.no_grad()
def test_perplexity_is_e_to_the_loss(tokenizer, pairs, files, capsys):
    """The loss is transformers': per token with the end token; per word, the end of a sentence is one more word."""
    model, total, tokens, count = noisy_translator(tokenizer), 0.0, 0, 0
    for source, target in pairs[:12]:
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        logits = model(**tokenizer(source, return_tensors="pt"), labels=labels).logits
        total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
        tokens, count = tokens + labels.shape[1], count + len(target.split(" ")) + 1
    assert main([*words(files, "hypotheses", "references", "sources", "model"), "--metrics", "chrf"]) == 0
    chrf, per_token, per_word = json.loads(capsys.readouterr().out)["figures"]
    assert chrf["name"] == "chrF"
    assert per_token["score"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert per_word["score"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert (per_token["details"]["count"], per_word["details"]["count"]) == (tokens, count)
    assert per_token["signature"].startswith("nrefs:1|unit:token|end:counted|model:")


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(tokenizer):
    """Zero weights make every token equally likely, so that the interval has no width either."""
    model = noisy_translator(tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    references = [["ein Hund", "die Katze schläft ."], ["Hund", "Katze"]]
    per_token, per_word = perplexities(model, tokenizer, ["a dog", "the cat sleeps ."], references, n_bootstrap=50)
    assert per_token.score == pytest.approx(model.config.vocab_size, rel=1e-5)
    assert per_token.interval.mean == pytest.approx(per_token.score) and per_token.interval.half_width < 1e-3
    ends_and_words = (2 + 1) + (4 + 1) + (1 + 1) + (1 + 1)
    tokens = sum(len(tokenizer(text)["input_ids"]) for stream in references for text in stream)
    assert per_word.score == pytest.approx(model.config.vocab_size ** (tokens / ends_and_words), rel=1e-4)


def test_a_perplexity_that_no_float_can_hold_is_infinite_and_null_in_json(tokenizer, files, monkeypatch, capsys):
    """Each sentence has two tokens, and the probability e to -2000."""
    monkeypatch.setattr(
        "training.evaluation.perplexity.token_log_probabilities",
        lambda model, tokenizer, sources, *_: [[-1500.0, -500.0]] * 12,
    )
    options = ["--metrics", "chrf", "--bootstrap", "20"]
    given = words(files, "hypotheses", "references", "sources", "model")
    assert main([*given, *options]) == 0
    out = capsys.readouterr().out
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    per_token = report["figures"][1]
    assert (per_token["name"], per_token["score"], per_token["interval"]) == ("perplexity per token", None, None)
    assert per_token["details"] == {"count": 24, "log_probability": -24000.0}
    assert "|bs:" not in per_token["signature"]
    assert main([given[0], *given[2:], *options]) == 0
    assert re.search(r"^perplexity per token +inf  -  ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("numbers", [[-math.inf, -1.0], [-1500.0, -500.0]])
def test_a_null_in_json_comes_with_its_reason(tokenizer, files, monkeypatch, capsys, numbers):
    """An infinite perplexity; resamples that are finite make no interval of it."""
    found = [numbers, *[[-1.0, -1.0]] * 11] if math.inf in map(abs, numbers) else [numbers] * 12
    monkeypatch.setattr("training.evaluation.perplexity.token_log_probabilities", lambda *_: found)
    given = words(files, "hypotheses", "references", "sources", "model")
    assert main([*given, "--metrics", "chrf", "--bootstrap", "20"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    figure = report["figures"][1]
    assert (figure["name"], figure["score"], figure["interval"]) == ("perplexity per token", None, None)
    assert "infinite" in figure["note"] and "null" in figure["note"]


def test_a_figure_that_is_not_a_number_is_no_json():
    report = Report("out", 1, 0, [MetricScore("chrF", 1.0, "v:1"), MetricScore("COMET", math.nan, "model:x")])
    with pytest.raises(ValueError, match=r"COMET of out is not a number \(NaN\)"):
        as_json(report)


def test_an_interval_of_a_mean_is_that_of_the_normal_distribution():
    numbers = torch.randn(2000, generator=torch.Generator().manual_seed(1)).tolist()
    interval = ratio_interval(lambda mean: mean, numbers, [1.0] * 2000, 1000)
    mean, deviation = torch.tensor(numbers).mean().item(), torch.tensor(numbers).std().item()
    assert interval.mean == pytest.approx(mean, abs=0.005)
    assert interval.half_width == pytest.approx(1.96 * deviation / math.sqrt(2000), rel=0.1)
    assert ratio_interval(lambda mean: mean, numbers, [1.0] * 2000, 1000) == interval
    assert ratio_interval(lambda mean: mean, numbers, [1.0] * 2000, 0) is None


def test_without_translations_the_model_makes_them(tokenizer, pairs, files, tmp_path, capsys):
    options = ["--examples", "20", "--output", str(tmp_path / "made")]
    assert main([*words(files, "model", "references", "sources"), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    sources, targets = zip(*pairs[:12])
    expected = translate(noisy_translator(tokenizer), tokenizer, list(sources))
    found = {example["line"]: example["hypothesis"] for example in result["worst"] + result["best"]}
    assert [found[line] for line in range(1, 13)] == [text.replace("\n", " ") for text in expected]
    assert (tmp_path / "made").read_text(encoding="utf-8").split("\n") == [*(found[i] for i in range(1, 13)), ""]
    assert result["score"] == sacrebleu.corpus_bleu([found[i] for i in range(1, 13)], [list(targets)]).score
    assert result["system"] == str(files / "model")
    assert [figure["name"] for figure in result["figures"][-2:]] == ["perplexity per token", "perplexity per word"]


FAKE_COMET = """#!{python}
import json, sys
words = [word for word in sys.argv[1:] if word != "--only_system"]
options = dict(zip(words[::2], words[1::2]))
if options["--model"] == "broken":
    sys.exit("no such model")
names = ("--sources", "--translations", "--references")
columns = [open(options[name], encoding="utf-8").read().split("\\n")[:-1] for name in names]
rows = [{{"src": s, "mt": t, "ref": r, "COMET": len(s) + (t == r.upper()) / 2}} for s, t, r in zip(*columns)]
json.dump({{options["--translations"]: rows}}, open(options["--to_json"], "w"))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "comet-score"
    path.write_text(FAKE_COMET.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_comet_is_the_mean_of_what_its_command_says(files, pairs, program, capsys):
    options = ["--comet", "--comet-program", program, "--metrics", "chrf", "--bootstrap", "20"]
    assert main([*words(files, "hypotheses", "references", "sources"), *options]) == 0
    comet = json.loads(capsys.readouterr().out)["figures"][-1]
    expected = [len(source) + 0.5 for source, _ in pairs[:12]]
    assert (comet["name"], comet["score"]) == ("COMET", pytest.approx(sum(expected) / 12))
    assert comet["signature"].startswith("model:Unbabel/wmt22-comet-da|bs:20|seed:")
    assert min(expected) < comet["interval"]["mean"] < max(expected)


def test_without_comet_the_message_says_how_to_get_it(files, program, capsys):
    given = words(files, "hypotheses", "references", "sources")
    assert main([*given, "--comet", "--comet-program", "nowhere/comet-score"]) == 1
    message = capsys.readouterr().err
    assert "'nowhere/comet-score'" in message and "pip install unbabel-comet" in message and message.count("\n") == 1
    assert main([*given, "--comet", "broken", "--comet-program", program]) == 1
    assert "ended with status 1: no such model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("not JSON", "JSONDecodeError"),
        ("[1]", "'list' object has no attribute"),
        ("{}", "not enough values"),
        ('{"a": [], "b": []}', "too many values"),
        ('{"a": 3}', "not iterable"),
        ('{"a": [3]}', "not subscriptable"),
        ('{"a": [{"comet": 1}]}', "KeyError"),
        ("[" * 100_000, "RecursionError"),
        ('{"a": [' + '{"COMET": 1},' * 12 + '{"COMET": 1}]}', "scored 13 sentences, expected 12"),
        ('{"a": [{"COMET": 1}]}', "scored 1 sentences, expected 12"),
        (
            '{"a": [' + '{"COMET": 1},' * 11 + '{"COMET": NaN}]}',
            "COMET of sentence 12: expected a finite number, found nan",
        ),
        ('{"a": [{"COMET": -1e999}]}', "COMET of sentence 1: expected a finite number, found -inf"),
        ('{"a": [{"COMET": null}]}', "COMET of sentence 1: expected a finite number, found None"),
        ('{"a": [{"COMET": "0.8"}]}', "COMET of sentence 1: expected a finite number, found 0.8"),
        (None, "ended with status 0: broken \ufffd lines"),
    ],
)
def test_another_output_of_comet_is_an_error_of_one_line(files, tmp_path, capsys, written, message):
    """The program's folder has a space in its name, and a dollar."""
    folder = tmp_path / "a $HOME; b"
    folder.mkdir()
    (folder / "written").write_text(written or "")
    program = folder / "comet score"
    copy = '[ -s "$here/written" ] || { printf "broken\\n\\377 lines" >&2; exit 0; }; cat "$here/written" > "$last"'
    program.write_text(f'#!/bin/sh\nhere=$(dirname "$0"); for last; do :; done\n{copy}\n')
    program.chmod(0o755)
    given = words(files, "hypotheses", "references", "sources")
    assert main([*given, "--metrics", "chrf", "--comet", "--comet-program", str(program)]) == 1
    out, error = capsys.readouterr()
    assert message in error and str(program) in error and (out, error.count("\n")) == ("", 1)
