import importlib
import json
import math
import sys

import pytest

from training.cli import COMMANDS, main


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["trian"]])
def test_an_unknown_command_is_an_error(capsys, words):
    assert main(words) == 2
    assert "usage: hf-vaswani COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"hf-vaswani {name}" in capsys.readouterr().out


def test_curves_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    history = [{"step": s, "loss": 5 / s, "learning_rate": 0.1} for s in (1, 2, 3)]
    history += [{"step": 3, "eval_loss": 1.0, "eval_bleu": 20.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert main(["curves", "--run", str(tmp_path), "--output", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["curves", "--run", str(tmp_path / "none"), "--output", "x.png"]) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"cut', "not a JSON object"),
        ("[]", "expected a JSON object, found []"),
        ('{"log_history": 3}', "'log_history' expected a list, got int"),
        ('{"log_history": [{"loss": 1}]}', "log_history[0]: step: expected a number, found None"),
        ('{"log_history": [{"step": 1, "loss": "x"}]}', "log_history[0]: loss: expected a number, found 'x'"),
        ('{"log_history": [], "max_steps": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ('{"log_history": ' + "[" * 5000 + "]" * 5000 + "}", "recursion"),
    ],
)
def test_a_broken_state_is_one_line_that_names_file_and_field(tmp_path, capsys, text, message):
    pytest.importorskip("matplotlib")
    (tmp_path / "trainer_state.json").write_text(text)
    assert main(["curves", "--run", str(tmp_path), "--output", str(tmp_path / "curves.png")]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'trainer_state.json'}: " in error and message in error
    assert error.count("\n") == 1


def test_a_missing_dependency_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    monkeypatch.delitem(sys.modules, "training.score", raising=False)
    assert main(["score", "--hypotheses", "x", "--references", "y"]) == 1
    assert "pip install 'hf-vaswani[train]'" in capsys.readouterr().err


def test_only_our_own_errors_hide_their_traceback(monkeypatch, capsys):
    module = importlib.import_module("training.score")
    monkeypatch.setattr(module, "main", lambda argv: math.sqrt(-1))
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        main(["score"])
    assert main(["curves", "--run", "nowhere", "--output", "x.png"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
