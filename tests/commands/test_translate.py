import contextlib
import gzip
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.killed_output import interrupted_after, killed_after_ten_lines
from support.models import noisy_translator, tiny_model
from support.paths import ROOT
from support.warm import WARM
from training.cli import main
from training.data.tokenizer import train_tokenizer
from training.inference import resumable_output
from training.inference.batches import token_batches
from training.inference.loading import load_ensemble
from training.inference.resumable_output import PartialOutput, model_files
from training.inference.translation import translate


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    noisy_translator(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(pairs):
    return [english for english, _ in pairs[:14]]


def one_by_one(tokenizer, sentences, **generation) -> list[str]:
    model = noisy_translator(tokenizer, **generation)
    return [translate(model, tokenizer, [sentence])[0] for sentence in sentences]


@pytest.fixture(scope="module")
def one_at_a_time(tokenizer, sentences) -> list[str]:
    return one_by_one(tokenizer, sentences)


def test_batches_hold_every_sentence_within_the_budget():
    lengths = [5, 1, 9, 0, 5, 30, 2, 2, 7, 0]
    batches = list(token_batches(lengths, budget=20))
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 4, 5, 6, 7, 8]  # 3 and 9 are empty
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= 20 or batch == [5]  # 30 tokens stand alone


@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_order_and_result_do_not_depend_on_the_batches(tokenizer, sentences, one_at_a_time, budget):
    model = noisy_translator(tokenizer)
    translations = translate(model, tokenizer, sentences, batch_tokens=budget)
    assert translations == one_at_a_time
    assert len(set(translations)) > 5


def test_an_empty_sentence_gives_an_empty_translation(tokenizer, sentences):
    model = noisy_translator(tokenizer)
    translations = translate(model, tokenizer, ["", sentences[0], "  "], max_new_tokens=4)
    assert (translations[0], translations[2]) == ("", "")
    assert translations[1]
    assert translate(model, tokenizer, []) == []


def test_command_translates_files_and_streams(checkpoint, tokenizer, sentences, tmp_path, monkeypatch, capsys):
    text = "".join(line + "\n" for line in [*sentences, "", sentences[0]])
    source, output = tmp_path / "in.en", tmp_path / "out.de"
    source.write_text(text, encoding="utf-8")
    assert main(["translate", "--model", str(checkpoint), "--input", str(source), "--output", str(output)]) == 0
    lines = output.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 17
    assert (lines[14], lines[15], lines[16]) == ("", lines[0], "")
    assert not list(tmp_path.glob("*.partial"))

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8"))))
    capsys.readouterr()
    assert main(["translate", "--model", str(checkpoint), "--window", "7"]) == 0
    assert capsys.readouterr().out == output.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["fifo", "descriptor"])
def test_a_pipe_is_translated_as_a_stream(checkpoint, sentences, one_at_a_time, tmp_path, kind):
    """A named one, and one that the shell makes of `<(command)`, of which /dev/stdin is another."""
    text, output = "".join(f"{line}\n" for line in sentences[:5]), tmp_path / "out.de"
    if kind == "fifo":
        source = str(tmp_path / "pipe")
        os.mkfifo(source)
        writer = threading.Thread(target=Path(source).write_text, args=(text,))
    else:
        read_end, write_end = os.pipe()
        source = f"/dev/fd/{read_end}"
        writer = threading.Thread(target=lambda: os.fdopen(write_end, "w").write(text))
    writer.start()
    assert main(["translate", "--model", str(checkpoint), "--input", source, "--output", str(output)]) == 0
    writer.join()
    assert output.read_text(encoding="utf-8").splitlines() == one_at_a_time[:5]


def test_a_window_is_written_before_the_next_lines_are_read(checkpoint, sentences, one_at_a_time, tmp_path):
    """A second line comes through the pipe only after the first translation is in the output, another pipe."""
    source, output = tmp_path / "in", tmp_path / "out"
    os.mkfifo(source)
    os.mkfifo(output)
    answers = []

    def converse():
        with open(output) as translations, open(source, "w") as questions:
            for sentence in sentences[:3]:
                print(sentence, file=questions, flush=True)
                answers.append(translations.readline().rstrip("\n"))

    user = threading.Thread(target=converse, daemon=True)  # must not keep the process if it waits for ever
    user.start()
    words = ["--model", str(checkpoint), "--input", str(source), "--output", str(output), "--window", "1"]
    assert main(["translate", *words]) == 0
    user.join(timeout=30)
    assert answers == one_at_a_time[:3]


@pytest.mark.parametrize("name", ["no/such/folder", "user/none"])
def test_a_model_that_is_not_there_is_named(name, tmp_path, capsys):
    (tmp_path / "in.en").write_text("A dog.\n")
    assert main(["translate", "--model", name, "--input", str(tmp_path / "in.en")]) == 1
    assert capsys.readouterr().err.startswith(f"hf-vaswani translate: {name}: no such folder")


def test_a_failed_translation_leaves_the_old_output(checkpoint, tmp_path, capsys):
    source, output = tmp_path / "in.en", tmp_path / "out.de"
    source.write_bytes(b"A dog.\nA \xff cat.\n")
    output.write_text("precious")
    assert main(["translate", "--model", str(checkpoint), "--input", str(source), "--output", str(output)]) == 1
    assert "in.en:2: byte 0xff" in capsys.readouterr().err
    assert output.read_text() == "precious"


def test_an_interrupted_translation_goes_on_where_it_was(checkpoint, sentences, tmp_path, capsys):
    source, output, whole = tmp_path / "in.en", tmp_path / "out.de", tmp_path / "whole.de"
    source.write_text("".join(line + "\n" for line in sentences), encoding="utf-8")
    words = ["translate", "--model", str(checkpoint), "--input", str(source), "--window", "4", "--output"]
    assert main([*words, str(whole)]) == 0
    expected = whole.read_text(encoding="utf-8")

    # Killed after ten lines and a half.
    process = WARM.Process(target=killed_after_ten_lines, args=([*words, str(output)],), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert not output.exists()
    partial = tmp_path / "out.de.partial"
    lines = partial.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 11 and lines[-1] == "half a li"

    assert main([*words, str(output)]) == 1
    assert "out.de.partial holds an earlier run: pass --resume" in capsys.readouterr().err
    assert main([*words, str(output), "--resume", "--num-beams", "3"]) == 1
    assert "another run: options ({}, now {'num_beams': 3})" in capsys.readouterr().err
    assert main([*words, str(output), "--resume"]) == 0
    assert output.read_text(encoding="utf-8") == expected
    assert {path.name for path in tmp_path.iterdir()} == {"in.en", "out.de", "whole.de"}
    assert main([*words, str(output), "--resume"]) == 1
    assert "there is no" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--window", "--batch-tokens", "--num-beams"])
def test_a_number_that_makes_no_sense_is_refused(checkpoint, tmp_path, capsys, option):
    output = tmp_path / "out.de"
    output.write_text("precious")
    with pytest.raises(SystemExit):
        main(["translate", "--model", str(checkpoint), "--output", str(output), option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
    assert output.read_text() == "precious"


def test_a_sentence_beyond_learned_positions_is_named(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=12)
    with pytest.raises(ValueError, match=r"A sentence has \d+ tokens.* end at 12: 'one two three"):
        translate(model, tokenizer, ["A dog.", "one two three four five six seven eight nine ten"])


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint, tokenizer, tmp_path, capsys):
    tiny_model(vocab_size=50).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "in").write_text("A dog.\n")
    assert main(["translate", "--model", str(tmp_path), "--input", str(tmp_path / "in")]) == 1
    assert f"the tokenizer has {len(tokenizer)} tokens, the model 50" in capsys.readouterr().err


# Formats


SHORT = {"max_extra_tokens": 8}  # quicker


@pytest.fixture(scope="module")
def short_checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    noisy_translator(tokenizer, **SHORT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def command(short_checkpoint, sentences, tmp_path):
    """Runs `hf-vaswani translate` on a few lines, and gives what it wrote; `None` where it failed."""
    source, output = tmp_path / "in.en", tmp_path / "out.de"
    source.write_text("".join(line + "\n" for line in [*sentences[:5], "", sentences[5]]), encoding="utf-8")

    def run(*words, text=None):
        if text is not None:
            source.write_text(text, encoding="utf-8")
        line = ["translate", "--model", str(short_checkpoint), "--input", str(source), "--output", str(output)]
        return None if main([*line, *words]) else output.read_text(encoding="utf-8")

    return run


def test_an_nbest_list_has_as_many_lines_for_every_sentence(command, tokenizer, sentences):
    rows = [line.split(" ||| ") for line in command("--n-best", "2").splitlines()]
    assert [int(number) for number, _, _ in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert [row[1:] for row in rows[10:12]] == [["", "0.0000"]] * 2
    texts = [row[1] for row in rows[::2]]
    best = [text.replace("\n", " ") for text in one_by_one(tokenizer, [*sentences[:5], "", sentences[5]], **SHORT)]
    assert texts == best
    assert all(float(first[2]) >= float(second[2]) for first, second in zip(rows[::2], rows[1::2]))


def test_json_lines_have_sources_scores_and_tokens(command, tokenizer, sentences):
    plain = one_by_one(tokenizer, [*sentences[:5], "", sentences[5]], **SHORT)
    lines = [json.loads(line) for line in command("--format", "jsonl", "--n-best", "2").splitlines()]
    assert [line["source"] for line in lines] == [*sentences[:5], "", sentences[5]]
    assert lines[5]["translations"] == []
    for line, best in zip(lines, plain):
        assert len(line["translations"]) == (2 if line["source"] else 0)
        for translation in line["translations"]:
            numbers = [number for _, number in translation["tokens"]]
            assert sum(numbers) == pytest.approx(translation["log_probability"], abs=0.01)
            assert all(number <= 0 for number in numbers)
            penalty = ((5 + len(numbers)) / 6) ** 0.6
            assert translation["score"] == pytest.approx(translation["log_probability"] / penalty, abs=1e-3)
        assert [translation["text"] for translation in line["translations"][:1]] == ([best] if best else [])


@pytest.mark.parametrize("form", ["text", "nbest", "jsonl"])
def test_every_format_goes_on_after_an_interruption(form, command, tmp_path):
    words = ["--format", form, "--window", "2", *([] if form == "text" else ["--n-best", "2"])]
    expected = command(*words)
    with interrupted_after(3):
        command(*words)
    partial = (tmp_path / "out.de.partial").read_text(encoding="utf-8")
    assert expected.startswith(partial) and not partial.endswith("\n")
    assert command(*words, "--resume") == expected


def test_what_is_translated_by_other_models_is_not_gone_on_with(
    command, short_checkpoint, sentences, tokenizer, tmp_path, capsys
):
    """Folder names do not matter: two checkpoints of one name differ, and a moved one is the same."""
    folder, moved = tmp_path / "model", tmp_path / "moved"
    shutil.copytree(short_checkpoint, folder)
    words = ["--window", "2", "--model"]
    expected = command(*words, str(folder))
    with interrupted_after(3):
        command(*words, str(folder))
    capsys.readouterr()

    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "num_beams": 1}))
    assert command(*words, str(folder), "--resume") is None
    assert "another run: generation_config.json of model 1." in capsys.readouterr().err
    other = noisy_translator(tokenizer, **SHORT)
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)
    other.save_pretrained(folder)
    assert command(*words, str(folder), "--resume") is None
    assert "another run: model.safetensors of model 1." in capsys.readouterr().err
    assert command(*words, str(short_checkpoint), str(short_checkpoint), "--resume") is None
    error = capsys.readouterr().err
    assert "model.safetensors of model 2" in error and "of model 1" not in error
    assert command(*words, str(short_checkpoint), "--resume", "--batch-tokens", "60") is None
    assert "batch_tokens (1024, now 60)" in capsys.readouterr().err

    shutil.copytree(short_checkpoint, moved)
    assert command(*words, str(moved), "--resume") == expected


def test_files_of_a_model_on_the_hub_are_those_in_its_cache(short_checkpoint, monkeypatch):
    found = []

    def cached(name, file, **options):
        found.append((name, options))
        return str(short_checkpoint / file)

    monkeypatch.setattr(resumable_output, "cached_file", cached)
    assert model_files(["user/name"]) == model_files([str(short_checkpoint)])
    assert found == [("user/name", {"local_files_only": True})]
    names = {name.removesuffix(" of model 1") for name in model_files([str(short_checkpoint)])}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names


def test_a_line_that_stopped_the_run_may_be_mended(command, sentences, tmp_path):
    """Not one that is translated already."""
    words = ["--max-source-tokens", "30", "--window", "2"]
    good = [*sentences[:2], "A dog.", "A cat."]
    bad = [*good[:3], "xy" * 60]
    assert command(*words, text="\n".join(bad)) is None
    assert len((tmp_path / "out.de.partial").read_text().splitlines()) == 2
    (tmp_path / "in.en").write_text("\n".join(["A man.", *good[1:]]))
    assert command(*words, "--resume") is None
    found = command(*words, "--resume", text="\n".join(good))
    assert len(found.splitlines()) == 4 and found == command(*words, text="\n".join(good))


def test_an_output_that_ends_in_gz_is_compressed_also_when_it_is_resumed(command, tmp_path):
    expected, output = command("--window", "2"), tmp_path / "out.de.gz"
    with interrupted_after(3):
        command("--window", "2", "--output", str(output))
    assert command("--window", "2", "--output", str(output), "--resume") == expected
    assert gzip.decompress(output.read_bytes()).decode() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"in.en", "out.de", "out.de.gz"}


@pytest.mark.parametrize("name", ["fifo", "fifo.gz"])
def test_a_fifo_is_written_to(name, command, tmp_path, capsys):
    expected, fifo = command(), tmp_path / name
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as executor:
        read = executor.submit(fifo.read_bytes)
        assert command("--output", str(fifo)) == expected
        data = read.result()
    assert (gzip.decompress(data) if name == "fifo.gz" else data).decode() == expected
    assert fifo.is_fifo()
    assert command("--output", str(fifo), "--input", str(fifo)) is None
    assert f"--output {fifo}: is the same file as the input {fifo}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("--output", str(fifo), "--resume")
    assert "--resume needs" in capsys.readouterr().err


def test_a_device_is_written_to(command):
    expected = command(text="A dog.\n")
    terminal, device = os.openpty()
    assert command("--output", os.ttyname(device)) == expected
    assert os.read(terminal, 10_000).decode().replace("\r\n", "\n") == expected


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_the_standard_output_has_two_names(name, command, capsys):
    expected = command()
    capsys.readouterr()
    command("--output", name)
    assert capsys.readouterr().out == expected


def test_two_runs_do_not_write_one_file(tmp_path):
    """One that is at work, one that begins anew, one that resumes it."""
    output, job = str(tmp_path / "out.de"), {"settings": {"window": 2}, "files": {}}
    with PartialOutput(output, job, iter([])) as first:
        for resume in (False, True):
            with pytest.raises(BlockingIOError, match=r"out.de.partial: another run is writing it"):
                PartialOutput(output, job, iter([]), resume).__enter__()
        first.write("ein Hund\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out.de": "ein Hund\n"}


def test_the_speed_is_reported_and_the_bar_counts_what_was_there(command, tmp_path, caplog, capsys):
    whole = command()
    assert "7 sentences in" in caplog.text and "source tokens/s." in caplog.text
    assert "7/7" in capsys.readouterr().err
    words = ("--window", "2")
    with interrupted_after(5):
        command(*words)
    capsys.readouterr()
    caplog.clear()
    assert command(*words, "--resume") == whole
    bar = capsys.readouterr().err
    assert "4/7" in bar and "7/7" in bar and "0/7" not in bar
    assert "3 sentences in" in caplog.text


# Terminals


class Conversation:
    """A process at a terminal of its own, and all that it has printed."""

    def __init__(self, words: list[str]):
        self.terminal, terminal = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "training.cli", *words]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        os.close(terminal)
        self.text = ""

    def wait_for(self, count: int, line: str) -> None:
        """Read until a line has come so often."""
        while self.text.splitlines().count(line) < count:
            self._read()

    def end(self) -> int:
        with contextlib.suppress(OSError):  # the terminal is closed
            while True:
                self._read()
        os.close(self.terminal)
        return self.process.wait()

    def _read(self) -> None:
        if not select.select([self.terminal], [], [], 120)[0]:
            self.process.kill()
            raise AssertionError(f"nothing more came after {self.text!r}")
        if not (read := os.read(self.terminal, 4096)):
            raise OSError
        self.text += read.decode()


@pytest.mark.parametrize("end", ["Ctrl-D", pytest.param("Ctrl-C", marks=pytest.mark.slow)])
def test_each_line_typed_at_a_terminal_is_answered_at_once(short_checkpoint, tokenizer, sentences, end):
    answers = [line.replace("\n", " ") for line in one_by_one(tokenizer, sentences[:2], **SHORT)]
    words = ["translate", "--model", str(short_checkpoint), "--max-source-tokens", "40"]
    conversation = Conversation(words)
    conversation.wait_for(1, "Reading standard input, one sentence per line. Ctrl-D ends.")
    for sentence, answer in zip(sentences[:2], answers):  # the second is typed only after the first answer
        os.write(conversation.terminal, f"{sentence}\n".encode())
        conversation.wait_for(1, answer)
    os.write(conversation.terminal, b"xy" * 40 + b"\n")
    os.write(conversation.terminal, f"{sentences[0]}\n".encode())
    conversation.wait_for(2, answers[0])
    if end == "Ctrl-D":
        os.write(conversation.terminal, b"\x04")
    else:
        conversation.process.send_signal(signal.SIGINT)
    assert conversation.end() == 0
    lines = conversation.text.splitlines()
    assert [line for line in lines if line in answers] == [*answers, answers[0]]
    assert [line for line in lines if line.startswith("Skipped: ") and "where 40 are allowed" in line]
    assert not any("Traceback" in line or "it/s" in line or "sentences/s" in line for line in lines)


# Lines that are too long


def test_a_longer_line_is_cut_translated_and_reported(command, tokenizer, sentences, caplog):
    text = f"{sentences[0]}\n{sentences[1]} {sentences[2]} {sentences[3]}\n{sentences[4]}\n"
    longest = max(len(tokenizer(sentence)["input_ids"]) for sentence in sentences[:5])
    assert longest < len(tokenizer(" ".join(sentences[1:4]))["input_ids"]) - 1
    parts = [line.replace("\n", " ") for line in one_by_one(tokenizer, sentences[:5], **SHORT)]
    found = command("--max-source-tokens", str(longest), text=text)
    assert found.split("\n") == [parts[0], " ".join(parts[1:4]), parts[4], ""]
    assert f"more than {longest} tokens: 1 lines of" in caplog.text and "in.en (2)." in caplog.text
    caplog.clear()
    whole = command("--max-source-tokens", "1000")
    assert "into pieces" not in caplog.text and whole != found


def test_a_cut_lines_scores_are_the_sums_of_its_pieces(command, sentences):
    words = ["--max-source-tokens", "40", "--format", "jsonl", "--n-best", "2"]
    apart = [json.loads(line) for line in command(*words, text=f"{sentences[1]}\n{sentences[2]}\n").splitlines()]
    [line] = [json.loads(line) for line in command(*words, text=f"{sentences[1]} {sentences[2]}\n").splitlines()]
    assert len(line["translations"]) == 2
    for rank, translation in enumerate(line["translations"]):
        pieces = [piece["translations"][rank] for piece in apart]
        assert translation["text"] == " ".join(piece["text"] for piece in pieces)
        for name in ("score", "log_probability"):
            assert translation[name] == pytest.approx(sum(piece[name] for piece in pieces), abs=2e-3)
        assert len(translation["tokens"]) == sum(len(piece["tokens"]) for piece in pieces)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"in.en:2: \d+ tokens without white space to split them at, where 30 are allowed: 'xyxyxy"),
        (["--long-lines", "error"], r"in.en:2: \d+ tokens, where 30 are allowed: 'xyxyxy"),
    ],
)
def test_a_line_that_cannot_or_must_not_be_cut_is_named(command, tmp_path, capsys, words, message):
    assert command("--max-source-tokens", "30", *words, text="A dog.\n" + "xy" * 40 + "\n") is None
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert (tmp_path / "out.de.partial").read_text() == ""  # nothing of its window


@pytest.mark.parametrize("words", [[], ["--long-lines", "error"]])
def test_bad_lines_are_skipped_and_reported(command, sentences, tmp_path, capsys, caplog, words):
    bad, prefix = "xy" * 40, tmp_path / "prefix"
    text = f"{sentences[0]}\n{bad}\n{sentences[1]}\n\n{sentences[2]}\n{bad}\n"
    expected = command("--max-source-tokens", "40", text=text.replace(bad, "")).splitlines()
    words += ["--max-source-tokens", "40", "--skip-bad-lines"]
    assert command(*words, text=text).splitlines() == expected
    assert all(expected[index] for index in (0, 2, 4)) and (expected[1], expected[5]) == ("", "")
    message = caplog.text
    assert "2 lines of" in message and "in.en (2, 6)." in message and "where 40 are allowed: 'xyxy" in message

    rows = [json.loads(line) for line in command(*words, "--format", "jsonl", text=text).splitlines()]
    assert [line for line, row in enumerate(rows, 1) if "skipped" in row] == [2, 6]
    assert all("40 are allowed" in rows[index]["skipped"] and rows[index]["translations"] == [] for index in (1, 5))
    assert [len(row["translations"]) for row in rows] == [1, 0, 1, 0, 1, 0]

    prefix.write_text("\n" * 2 + "Hund " * 60 + "\n" * 4)
    expected[2] = ""
    assert command(*words, "--target-prefix", str(prefix), text=text).splitlines() == expected
    assert "in.en (2, 3, 6)." in caplog.text


def test_a_run_that_a_bad_line_stopped_goes_on_and_skips_it(command, sentences, tmp_path):
    words = ["--max-source-tokens", "40", "--window", "2"]
    text = "\n".join([*sentences[:3], "xy" * 40, sentences[3]])
    assert command(*words, text=text) is None
    assert len((tmp_path / "out.de.partial").read_text().splitlines()) == 2
    found = command(*words, "--resume", "--skip-bad-lines").splitlines()
    assert [bool(line) for line in found] == [True, True, True, False, True]
    assert found == command(*words, "--skip-bad-lines").splitlines()


def test_learned_positions_are_the_limit(tokenizer, tmp_path, capsys):
    tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=12).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "in").write_text("A dog and a cat and a dog and a cat and a dog.\n")
    line = ["translate", "--model", str(tmp_path), "--input", str(tmp_path / "in"), "--num-beams", "1"]
    assert main([*line, "--long-lines", "error"]) == 1
    assert "tokens, where 12 are allowed" in capsys.readouterr().err
    assert main([*line, "--max-source-tokens", "13"]) == 1
    assert "--max-source-tokens 13: the model's learned positions end at 12" in capsys.readouterr().err


# Prefixes


def test_each_translation_begins_with_its_line_of_the_prefixes(command, tokenizer, sentences, tmp_path):
    plain = command().split("\n")
    prefixes = ["Der Hund ", "", "Die kleine Katze", "  ", "Ein", "Das", "Die"]
    (tmp_path / "prefix").write_text("\n".join(prefixes) + "\n")
    found = command("--target-prefix", str(tmp_path / "prefix")).split("\n")
    assert len(found) == len(plain) == 8
    for prefix, before, after in zip(prefixes, plain, found):
        if not before:
            assert not after  # an empty line stays empty
        elif prefix.strip():
            assert after.startswith(prefix.rstrip()) and not before.startswith(prefix.rstrip())
        else:
            assert after == before


def test_prefixes_that_do_not_fit_are_refused(command, tmp_path, capsys):
    prefix = tmp_path / "prefix"
    prefix.write_text("Der\n")
    assert command("--target-prefix", str(prefix), text="A dog.\nA cat.\n") is None
    assert f"{prefix} has 1 lines, and {tmp_path / 'in.en'} has more" in capsys.readouterr().err
    prefix.write_text("Der\n" + "Hund " * 60 + "\n")
    assert command("--target-prefix", str(prefix), text="A dog.\nA cat.\n") is None
    message = capsys.readouterr().err
    assert re.search(r"prefix:2: a prefix of \d+ tokens, but .* \d+ source tokens has at most \d+", message)


# Sampling and ensembles


def test_samples_are_reproducible_and_do_not_depend_on_the_batches(command):
    def texts(*words):
        lines = command("--sample", "--n-best", "3", "--top-k", "40", *words).splitlines()
        return [line.split(" ||| ")[1] for line in lines]

    found = texts()
    assert texts("--batch-tokens", "40", "--window", "2") == found
    assert texts("--seed", "1") != found
    assert len(set(found)) > 15 and found[15:18] == ["", "", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-k", "3"], "--top-k needs --sample"),
        (["--seed", "3"], "--seed needs --sample"),
        (["--sample", "--num-beams", "2"], "--sample has no beams, got --num-beams 2"),
        (["--sample", "--temperature", "0"], "must be above 0, got 0"),
        (["--sample", "--top-p", "1.5"], "must be above 0 and at most 1, got 1.5"),
        (["--format", "text", "--n-best", "2"], "--n-best needs --format nbest or jsonl"),
        (["--n-best", "0"], "must be at least 1, got 0"),
        (["--target-prefix", "-"], "--target-prefix must be a file"),
        (["--input", "-", "--processes", "2"], "--processes needs an --input file"),
    ],
)
def test_what_makes_no_sense_together_is_refused(command, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        command(*words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_more_translations_than_beams_are_refused(command, capsys):
    assert command("--n-best", "3") is None
    assert re.search("n_best=3 .*num_beams=2", capsys.readouterr().err)


def test_models_of_an_ensemble_need_one_tokenizer(checkpoint, command, pairs, tmp_path, capsys):
    other = train_tokenizer([english for english, _ in pairs], vocab_size=390, show_progress=False)
    noisy_translator(other).save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    assert command("--model", str(checkpoint), str(checkpoint), str(tmp_path / "other")) is None
    assert f"{checkpoint} and {tmp_path / 'other'} have different tokenizers" in capsys.readouterr().err


def test_all_models_are_loaded_for_an_ensemble(checkpoint):
    models, tokenizer = load_ensemble([str(checkpoint), str(checkpoint)])
    assert len(models) == 2 and models[0] is not models[1]
    assert tokenizer("A dog.")["input_ids"]
