import contextlib
import dataclasses
import getpass
import importlib
import importlib.util
import json
import logging
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import hf_vaswani
from support.models import noisy_translator
from support.paths import ROOT
from training import cli
from training.cli import COMMANDS, main
from training.inference.resumable_output import PartialOutput
from training.options import Parser
from training.trainer.command_line import UsageError, parse_values
from training.trainer.fields import OWN_GROUPS


def run_python(*words: str, input: str = "") -> subprocess.CompletedProcess:
    """Python by itself, with this checkout and in no other way than a user would start it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, input=input, capture_output=True, text=True, timeout=300)


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_without_a_command_the_commands_are_listed_as_an_error(capsys):
    assert main([]) == 2
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
    monkeypatch.delitem(sys.modules, "training.evaluation.scoring", raising=False)  # imports it first
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


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    noisy_translator(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    lines += [([name, "--help"], 0) for name in COMMANDS]
    lines += [
        ([name, "--no-such-option"], 2) for name in COMMANDS if name != "train"
    ]  # which compares with all fields
    lines += [(["train", "--max_steps", "many"], 2), (["train", "--config", "no-such-recipe"], 1)]
    lines += [(["train", "--model", "bse"], 1)]
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


# Options and mistakes


def parser_of(name: str) -> Parser:
    return importlib.import_module(f"training.{name.replace('-', '_')}").make_parser()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_has_two_spellings_and_no_abbreviation(name, capsys):
    options = {option for action in parser_of(name)._actions for option in action.option_strings}
    long = [option for option in options if re.search("[a-z][-_]", option)]
    assert long or name in {"compile", "curves", "demo-data", "env"}
    shown = "_" if name == "train" else "-"
    for option in long:
        assert option == "--help-all" or shown in option[2:]
        for spelling, message in ((option, None), (respelled(option), None), (option[:-1], "unknown option")):
            with contextlib.suppress(SystemExit, UsageError):
                parser_of(name).parse_known_args([spelling])
                assert message is None
            error = capsys.readouterr().err
            assert ("unknown option" in error) == (message is not None and name != "train"), (spelling, error)


def respelled(option: str) -> str:
    return "--" + option[2:].translate(str.maketrans("-_", "_-"))


def test_an_option_with_a_value_may_be_spelled_with_underscores():
    parser = parser_of("translate")
    args = parser.parse_args(["--model", "m", "--num_beams", "3", "--length_penalty=0.5", "--output", "a_b-c"])
    assert (args.num_beams, args.length_penalty, args.output) == (3, 0.5, "a_b-c")
    values = parse_values(["--max-steps", "7", "--eval-files=a_b-c", "--no-eval-bleu"])
    assert values.training == {"max_steps": 7, "eval_bleu": False} and values.data.eval_files == ["a_b-c"]


def test_what_looks_like_an_option_in_a_value_is_left_alone():
    args = parser_of("attention").parse_args(["--model", "m", "--source", "--a_b c", "--output", "x.png"])
    assert args.source == "--a_b c"


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["trian"], ["unknown command trian", "'train'"]),
        (["score_pairs"], ["unknown command score_pairs", "'score-pairs'"]),
        (["translate", "--num-beam", "3"], ["unknown option --num-beam", "'--num-beams'"]),
        (["translate", "--batch_token=3"], ["unknown option --batch-token", "'--batch-tokens'"]),
        (["translate", "--model", "m", "--format", "json"], ["--format", "'json'", "Did you mean 'jsonl'"]),
        (["score", "--references", "r", "--metrics", "blue"], ["--metrics", "Did you mean 'bleu'"]),
        (["train", "--max_stesp", "3"], ["unknown option --max_stesp", "'--max_steps'"]),
        (["train", "--weigth-decay", "3"], ["unknown option --weigth_decay", "'--weight_decay'"]),
        (["train", "--eval_strategy", "step"], ["--eval_strategy", "Did you mean 'steps'"]),
        (["train", "--max_steps", "many"], ["--max_steps", "invalid int value: 'many'"]),
        (["train", "--resume", "maybe"], ["--resume", "expected true or false, got 'maybe'"]),
        (["ablate", "--config", "demo", "--output", "o", "--", "--max_stesp", "3"], ["after --", "'--max_steps'"]),
    ],
)
def test_a_mistake_in_arguments_is_one_line_with_the_closest_name(words, facts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    first, second = error.splitlines()
    assert status == 2 and all(fact in first for fact in facts), error
    assert first.startswith("hf-vaswani") and "error: " in first and "--help" in second


@pytest.mark.parametrize(
    ("recipe", "facts"),
    [
        ("model: bse", ["model: ", "'bse'", "Did you mean 'base'"]),
        ("model_overrides: {d_modell: 128}", ["model_overrides: ", "'d_modell'", "Did you mean 'd_model'"]),
        ("model_overrides: {d_model: 130}", ["num_heads=8", "d_model=130"]),
        ("max_stesp: 3", ["max_stesp", "Did you mean 'max_steps'"]),
    ],
)
def test_a_mistake_in_the_model_is_found_before_the_data_are_read(recipe, facts, tmp_path, capsys):
    os.mkfifo(tmp_path / "pairs.tsv")  # who opens it waits forever
    (tmp_path / "mine.yaml").write_text(f"{recipe}\ntrain_files: [{tmp_path / 'pairs.tsv'}]\n")
    assert main(["train", "--config", str(tmp_path / "mine.yaml"), "--output_dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert all(fact in error for fact in [*facts, "mine.yaml"]) and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


# Help


def help_of(words: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_help_of_train_has_the_fields_of_this_project_and_their_own_defaults(capsys):
    text = help_of(["train", "--help"], capsys)
    own = [field for group in OWN_GROUPS for field in dataclasses.fields(group)]
    assert len(own) > 50
    for field in own:
        assert f"--{field.name} " in text and field.metadata["help"] in text
    for name, default in (("adam_beta2", "0.98"), ("warmup_steps", "4000"), ("lr_scheduler_type", "inverse_sqrt")):
        assert re.search(rf"--{name} [^-]*\(default: {default}\)", text)
    assert not re.search("--no_|--weight_decay|label_smoothing_factor", text)


def test_all_help_adds_the_fields_of_transformers_that_have_an_effect(capsys):
    text = help_of(["train", "--help-all"], capsys)
    assert all(f"--{name} " in text for name in ("adam_beta2", "weight_decay", "bf16", "gradient_accumulation_steps"))
    assert text.count("--adam_beta2") == text.count("--output_dir") == 1
    assert not re.search("--no_|--per_device_train_batch_size |--label_smoothing_factor", text)


def test_the_help_of_align_names_nothing_internal(capsys):
    assert "best_maps" not in help_of(["align", "--help"], capsys)


# Other packages


def test_notices_of_other_packages_need_verbose(monkeypatch, capsys):
    def work(argv: list[str]) -> None:
        for name in ("foreign.some", "training.env", "hf_vaswani.some"):
            logging.getLogger(f"{name}{len(argv)}").warning("a warning of %s", name)
        logging.getLogger(f"foreign.other{len(argv)}").error("an error")
        warnings.warn("a Python warning", FutureWarning, stacklevel=1)

    monkeypatch.setattr(importlib.import_module("training.env"), "main", work)
    own = ["a warning of training.env", "a warning of hf_vaswani.some", "an error"]
    for words, expected in ((["env"], own), (["env", "--verbose"], ["a warning of foreign.some", *own])):
        records = []
        handler = logging.Handler()
        handler.emit = lambda record, records=records: records.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert main(words) == 0
        finally:
            logging.getLogger().removeHandler(handler)
        assert (records, len(caught)) == (expected, "--verbose" in words)


def test_a_command_prints_nothing_of_other_packages(checkpoint, tmp_path):
    """torch, transformers and torchao have something to say when they are imported, and when weights are loaded and
    saved. `python -m training.average` is how launchers start a command."""
    output = str(tmp_path / "mean")
    done = run_python("-m", "training.average", "--checkpoints", str(checkpoint), str(checkpoint), "--output", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(output)


# Ctrl-C


INTERRUPTED_IN_AN_IMPORT = """
import os, signal, sys, threading, time
from training.cli import main

def interrupt():
    while "torch" not in sys.modules:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_modules_are_imported_is_one_line():
    done = run_python("-c", INTERRUPTED_IN_AN_IMPORT, "env")
    assert (done.returncode, done.stderr) == (130, "hf-vaswani env: interrupted.\n")


def interrupt(*_) -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_translating_names_resume(checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.en").write_text("A dog sleeps.\n" * 10)
    output = tmp_path / "out.de"
    end_window = PartialOutput.end_window

    def interrupted_in_the_second(self, lines) -> None:
        if self.sentences > 4:
            signal.raise_signal(signal.SIGINT)
        end_window(self, lines)

    monkeypatch.setattr(PartialOutput, "end_window", interrupted_in_the_second)
    words = ["translate", "--model", str(checkpoint), "--input", str(tmp_path / "in.en"), "--output", str(output)]
    assert main([*words, "--window", "4"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hf-vaswani translate: interrupted.") and "--resume" in last
    monkeypatch.undo()
    assert main([*words, "--window", "4", "--resume"]) == 0
    assert output.read_text().count("\n") == 10


@pytest.mark.parametrize(("has_checkpoint", "facts"), [(True, ["--resume", "checkpoint-3"]), (False, [])])
def test_ctrl_c_before_the_training_names_the_checkpoint_to_resume(
    has_checkpoint, facts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("training.trainer.run.train", interrupt)
    if has_checkpoint:
        (tmp_path / "checkpoint-3").mkdir()
        (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3, "log_history": []}')
    assert main(["train", "--output_dir", str(tmp_path)]) == 130
    error = capsys.readouterr().err
    assert error.startswith("hf-vaswani train: interrupted.") and error.count("\n") == 1
    assert all(fact in error for fact in facts) and ("--resume" in error) == has_checkpoint


def test_ctrl_c_in_an_ablation_says_that_the_same_command_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.ablation.experiment.Ablation.prepare", interrupt)
    assert main(["ablate", "--config", "demo", "--rows", "base", "--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "hf-vaswani ablate: interrupted. The same command continues.\n"
