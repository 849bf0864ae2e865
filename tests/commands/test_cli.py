import getpass
import importlib
import importlib.util
import json
import logging
import math
import os
import platform
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import hf_vaswani
from support.paths import ROOT
from training import cli
from training.cli import COMMANDS, main


def run_python(*words: str, input: str = "") -> subprocess.CompletedProcess:
    """Python by itself, with this checkout and in no other way than a user would start it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, input=input, capture_output=True, text=True, timeout=300)


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
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.base", None)
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


def test_what_a_sub_package_tells_the_user_is_one_line_too(monkeypatch, capsys):
    module = importlib.import_module("training.score")
    for folder, ours in ((Path(cli.__file__).parent / "benchmarks", True), (Path(math.__spec__.origin or "/"), False)):
        space = {}
        exec(compile("def fail(argv): raise ValueError('five')", str(folder / "some.py"), "exec"), space)
        monkeypatch.setattr(module, "main", space["fail"])
        if ours:
            assert main(["score"]) == 1
            assert capsys.readouterr().err == "hf-vaswani score: five\n"
        else:
            with pytest.raises(ValueError, match="five"):
                main(["score"])


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-vaswani {hf_vaswani.__version__}\n"


# In one process: what an earlier line imports, the lines after it hold against it too.
WITHOUT_MODELS = """
import contextlib, io, json, sys, time
from training import cli
heavy = {"torch", "transformers", "datasets", "numpy", "tokenizers", "sacrebleu"}
for words in json.load(sys.stdin):
    started, printed = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = cli.main(words)
        except SystemExit as stop:
            status = stop.code
    seconds = time.process_time() - started
    print(json.dumps([words, status, sorted(heavy & set(sys.modules)), seconds, printed.getvalue()]))
"""


def test_help_and_mistakes_in_arguments_do_not_import_torch():
    lines = [(["--version"], 0), (["--help"], 0), (["trian"], 2), ([], 2)]
    lines += [([name, "--help"], 0) for name in COMMANDS if name != "train"]
    lines += [([name, "--no-such-option"], 2) for name in COMMANDS if name != "train"]
    done = run_python("-c", WITHOUT_MODELS, input=json.dumps([words for words, _ in lines]))
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(lines), done.stderr
    for (words, expected), (_, status, heavy, seconds, printed) in zip(lines, results):
        assert (status, heavy) == (expected, []), words
        assert seconds < 0.5 and "hf-vaswani" in printed, (words, seconds)


def test_a_bug_report_has_versions_and_devices_and_names_nobody(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    facts = dict(line.split("  ", 1) for line in text.splitlines())
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    assert facts["hf-vaswani"] == hf_vaswani.__version__
    assert facts["Python"].startswith(platform.python_version())
    assert (facts["torch"], facts["transformers"]) == (torch.__version__, transformers.__version__)
    assert facts["threads"] == f"{torch.get_num_threads()}, OMP_NUM_THREADS=3"
    assert platform.system() in facts["operating system"] and platform.machine() in facts["operating system"]
    assert facts["cores"].endswith(f"of {os.cpu_count()}") and facts["processor"]
    assert {"accelerate", "datasets", "tokenizers", "sacrebleu", "evaluate", "accelerators"} <= facts.keys()
    private = {getpass.getuser(), socket.gethostname(), str(Path.home()), sys.prefix, str(Path.cwd())}
    assert private.isdisjoint(text.split()) and str(Path.home()) + os.sep not in text


def test_a_bug_report_names_each_accelerator(capsys, monkeypatch):
    """Two that are not there."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H{200 + device.index}")
    memory = type("Properties", (), {"total_memory": 139 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert main(["env"]) == 0
    assert "cuda:0: NVIDIA H200, 139 GiB; cuda:1: NVIDIA H201, 139 GiB\n" in capsys.readouterr().out


def test_a_bug_report_tells_what_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(importlib.import_module("training.env"), "PACKAGES", ("torch", "no-such-package"))
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split("  ", 1)[1].strip() == "not installed"


@pytest.mark.parametrize("module", ["training.cli translate", "training.train"])
def test_other_packages_notices_do_not_reach_the_user(module):
    """Nor where a module is run by itself, as `accelerate launch` and torchrun do. torchao has something to say only
    where it is installed, and not in every version: the test of the filter is the next one."""
    done = run_python("-m", *module.split(), "--help")
    assert done.returncode == 0 and "usage" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "notice", "args"),
    [
        ("torchao", "Failed to load /torchao/_C.so: Could not load this library", ()),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version.", ()),
        ("torch.utils._pytree", "%s is an Enum subclass and is now natively supported by torch.compile", (int,)),
    ],
)
def test_only_notices_are_kept_out(name, notice, args, caplog):
    logger = logging.getLogger(name)
    with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match="mine"):
        logger.propagate = True
        logger.warning(notice, *args)
        logger.warning("Quantization of lm_head is skipped")
        logger.error("It broke")
        logging.getLogger("training.train").warning("Failed to load")
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert caplog.messages == ["Quantization of lm_head is skipped", "It broke", "Failed to load"]
