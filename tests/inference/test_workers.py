"""Several processes under gloo: forked by a process of their own, or started by torchrun."""

import json
import os
import signal
import subprocess
import sys

import pytest

from support.models import noisy_translator
from support.paths import ROOT
from support.two_processes import run_two
from training.cli import main
from training.inference.resumable_output import PartialOutput
from training.inference.workers import Processes


@pytest.fixture
def free_ports():
    import socket

    sockets = [socket.socket() for _ in range(8)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return iter(ports)


@pytest.fixture
def words(tokenizer, pairs, tmp_path):
    """A command line that lacks only its output."""
    noisy_translator(tokenizer, max_extra_tokens=8).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [english for english, _ in pairs[:16]]
    lines[7] = ""
    lines[11] = " ".join(lines[12:15])
    (tmp_path / "in.en").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    line = ["translate", "--model", str(tmp_path / "model"), "--input", str(tmp_path / "in.en"), "--window", "6"]
    return [*line, "--batch-tokens", "60", "--max-source-tokens", "50", "--output"]


def test_two_processes_write_what_one_writes_also_after_being_killed(words, tmp_path, free_ports):
    one = [*words, str(tmp_path / "one")]
    assert main(one) == 0
    errors = tmp_path / "errors"
    whole = run_two(next(free_ports), errors, "run", [*words, str(tmp_path / "two")])
    killed = run_two(next(free_ports), errors, "kill", [*words, str(tmp_path / "killed")])
    resumed = run_two(next(free_ports), errors, "run", [*words, str(tmp_path / "killed"), "--resume"])
    failed = run_two(next(free_ports), errors, "fail", [*words, str(tmp_path / "failed")])
    printed = errors.read_text(encoding="utf-8")
    assert whole == resumed == [0, 0], printed
    assert killed[0] == -signal.SIGKILL
    expected = (tmp_path / "one").read_bytes()
    assert len(expected.splitlines()) == 16
    assert (tmp_path / "two").read_bytes() == (tmp_path / "killed").read_bytes() == expected
    # An error of one is told once, by its process, and ends the other.
    assert failed == [0, 1]
    assert printed.count("rank 1 has no memory left") == 1
    assert not (tmp_path / "failed").exists()


# Imports once; then every round forks processes that open one output at the same moment, each a command of its own.
RIVALS = """
import json, multiprocessing, os, sys
from training.inference import file_translation  # noqa: F401, before the forks
from training.inference.resumable_output import PartialOutput
from training.cli import main

def rival(barrier, decided, words):
    enter, finish = PartialOutput.__enter__, PartialOutput._finish
    def together(self):
        barrier.wait(60)
        return enter(self)
    def last(self):
        decided.wait(60)  # else one that comes late could begin anew, rightly
        finish(self)
    PartialOutput.__enter__, PartialOutput._finish = together, last
    status = main(words)
    decided.set()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

def race(commands):
    context = multiprocessing.get_context("fork")
    barrier, decided = context.Barrier(len(commands)), context.Event()
    rivals = [context.Process(target=rival, args=(barrier, decided, words)) for words in commands]
    for each in rivals:
        each.start()
    for each in rivals:
        each.join()
    return [each.exitcode for each in rivals]

print(json.dumps([race(commands) for commands in json.loads(sys.argv[1])]))
"""


@pytest.mark.slow  # test_resumable_output.py has processes that open it at the same moment
def test_of_two_commands_with_one_output_one_writes_it(words, tmp_path):
    """At the same moment: two that begin, or two that resume."""
    words = [*words[:-1], "--num-beams", "1", "--output"]
    assert main([*words, str(tmp_path / "one")]) == 0
    expected = (tmp_path / "one").read_bytes()
    rounds = []
    for number in range(2):
        output, resumed = (str(tmp_path / f"{name}-{number}") for name in ("new", "resumed"))
        rounds += [[[*words, output], [*words, output]]]
        rounds += [[[*words, resumed, "--resume"], [*words, resumed, "--resume"]]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialOutput, "end_window", interrupt_second_window)
            assert main([*words, resumed]) == 130
    process = subprocess.run(
        [sys.executable, "-c", RIVALS, json.dumps(rounds)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    statuses = json.loads(process.stdout.splitlines()[-1])
    assert [sorted(each) for each in statuses] == [[0, 1]] * 4, process.stderr
    assert process.stderr.count("another run is writing it") + process.stderr.count("holds an earlier run") == 4
    assert process.stderr.count("holds an earlier run") <= 2 and "Traceback" not in process.stderr
    outputs = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith(("new", "resumed"))}
    assert len(outputs) == 4 and set(outputs.values()) == {expected}


def interrupt_second_window(self, lines, end_window=PartialOutput.end_window):
    if self.sentences:
        raise KeyboardInterrupt
    end_window(self, lines)


@pytest.mark.slow
def test_the_command_starts_its_processes_itself(words, tmp_path):
    words = [*words[:-1], "--format", "jsonl", "--n-best", "2", "--output"]
    assert main([*words, str(tmp_path / "one")]) == 0
    line = [sys.executable, "-m", "training.cli", *words, str(tmp_path / "two"), "--processes", "2"]
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": ROOT}
    process = subprocess.run(line, **options)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert "16 sentences in" in process.stderr
    process = subprocess.run([*line, "--resume"], **options)
    assert process.returncode == 1
    assert process.stderr.count("there is no") == 1 and "Traceback" not in process.stderr


@pytest.mark.slow
def test_torchrun_starts_the_module(words, tmp_path):
    assert main([*words, str(tmp_path / "one")]) == 0
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += ["-m", "training.translate", *words[1:], str(tmp_path / "two")]
    root = ROOT
    process = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=root, env={**os.environ})
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_process_alone_is_the_main_one():
    processes = Processes(cpu=True)
    assert (processes.rank, processes.count, processes.is_main) == (0, 1, True)
    assert processes.together(lambda: 3) == 3
    assert processes.gather([1, 2]) == [1, 2]
    with pytest.raises(KeyError, match="mine"):
        processes.together(lambda: {}["mine"])
    processes.end()
