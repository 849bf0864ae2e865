"""Outputs of commands: atomic on a full disk, and never over a device, a link or an input."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from support.models import noisy_translator
from training.cli import main
from training.inference.demo_page import write_space


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    """Inputs of the commands."""
    folder = tmp_path_factory.mktemp("read")
    for part in (noisy_translator(tokenizer, max_extra_tokens=3), tokenizer):
        part.save_pretrained(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.5}]}))
    for name, line in (("source", "a dog\n"), ("reference", "ein Hund\n")):
        (folder / name).write_text(line)
    return folder


def command(folder: Path, name: str) -> list[str]:
    model, attention = ["--model", str(folder)], ["--source", "a dog", "--target", "ein Hund"]
    files = ["--sources", str(folder / "source"), "--references", str(folder / "reference")]
    return {
        "curves.png": ["curves", "--run", str(folder)],
        "attention.png": ["attention", *model, *attention],
        "attention.html": ["attention", *model, *attention],
        "translations": ["score", *model, *files],
    }[name]


@pytest.mark.parametrize("name", ["curves.png", "attention.png", "attention.html", "translations"])
def test_what_cannot_be_written_to_its_end_leaves_the_earlier_file(folder, name, tmp_path, monkeypatch, capsys):
    figure = pytest.importorskip("matplotlib.figure").Figure
    output, written = tmp_path / name, []

    def full(file, *_, **__):
        written.append(file)
        if not isinstance(file, int):
            file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output.write_text("the earlier one")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        disk.setattr(figure, "savefig", lambda self, file, **_: full(file))
        assert main([*command(folder, name), "--output", str(output)]) == 1
    assert written and "No space left on device" in capsys.readouterr().err
    assert output.read_text() == "the earlier one"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert main([*command(folder, name), "--output", str(output)]) == 0
    assert b"the earlier one" not in output.read_bytes()


@pytest.mark.parametrize(
    ("name", "beginning"), [("a.png", b"\x89PNG"), ("a", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_the_ending_chooses_the_format_of_a_picture(folder, tmp_path, name, beginning):
    pytest.importorskip("matplotlib")
    assert main([*command(folder, "curves.png"), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(beginning)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# Refused before anything is loaded: there is no such model


SCORE = ["score", "--model", "nowhere", "--sources", "source", "--references", "reference"]
WRITERS = {
    "out": [
        ["translate", "--model", "nowhere", "--input", "source"],
        SCORE,
    ],
    "out.html": [["attention", "--model", "nowhere", "--source", "a dog"]],
    "out.png": [["attention", "--model", "nowhere", "--source", "a dog"], ["curves", "--run", "nowhere"]],
}
EACH = [(words, name) for name, lines in WRITERS.items() for words in lines]
KINDS = ("symbolic link", "folder", "FIFO")


def put(path: Path, kind: str):
    """Something in the place of an output."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (path.parent / "precious").write_text("precious")
        path.symlink_to("precious")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("source", "reference"):
        (tmp_path / name).write_text("a dog\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "name", "kind"),
    # `translate` writes to a FIFO.
    [(*each, kind) for each in EACH for kind in KINDS if (each[0][0], kind) != ("translate", "FIFO")],
)
def test_an_output_that_is_no_file_is_refused_at_once(words, name, kind, here, capsys):
    put(here / name, kind)
    before = (here / name).lstat()
    assert main([*words, "--output", name]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hf-vaswani {words[0]}: --output {name}: is a {kind}") and error.count("\n") == 1
    assert (here / name).lstat() == before
    if kind == "symbolic link":
        assert "precious" in error and (here / "precious").read_text() == "precious"


@pytest.mark.parametrize(("words", "name"), EACH)
def test_an_output_in_no_folder_is_refused_at_once(words, name, here, capsys):
    assert main([*words, "--output", f"there/{name}"]) == 1
    assert f"--output there/{name}: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (WRITERS["out"][0], "source"),
        ([*WRITERS["out"][0], "--target-prefix", "reference"], "reference"),
        (SCORE, "source"),
        (SCORE, "reference"),
        ([*SCORE, "--baseline", "more"], "more"),
    ],
)
def test_an_input_is_no_output(words, read, here, capsys):
    (here / "more").write_text("a dog\n")
    (here / "again").hardlink_to(here / read)
    for name in (read, "again"):
        assert main([*words, "--output", name]) == 1
        assert f"--output {name}: is the same file as the input {read}," in capsys.readouterr().err
        assert (here / name).read_text() == "a dog\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_the_model_is_no_output(folder, name, capsys):
    before = (folder / name).read_bytes()
    for words in (["translate", "--input", str(folder / "source")], command(folder, "translations")):
        assert main([*words, "--model", str(folder), "--output", str(folder / name)]) == 1
        assert f"is the same file as the input {folder / name}" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("ending", ["partial", "partial.json"])
def test_a_link_where_a_translation_would_grow_is_refused(ending, here, capsys):
    put(here / f"out.{ending}", "symbolic link")
    for more in ([], ["--resume"]):
        assert main([*WRITERS["out"][0], "--output", "out", *more]) == 1
        error = capsys.readouterr().err
        assert f"--output out.{ending}: is a symbolic link to precious" in error and error.count("\n") == 1
    assert (here / "precious").read_text() == "precious"


def test_a_curve_has_the_ending_of_a_picture(here, capsys):
    with pytest.raises(SystemExit):
        main(["curves", "--run", ".", "--output", "source.gz"])
    assert "--output source.gz: must end in .png, .svg, .pdf" in capsys.readouterr().err


def test_scored_translations_are_compressed_by_their_name(folder, tmp_path):
    output = tmp_path / "out.gz"
    assert main([*command(folder, "translations"), "--output", str(output)]) == 0
    assert main([*command(folder, "translations"), "--output", str(tmp_path / "out")]) == 0
    assert gzip.decompress(output.read_bytes()) == (tmp_path / "out").read_bytes() != b""


# Folders


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["average", "--run", "nowhere", "--output"], "--output"),
        (["ablate", "--config", "nowhere", "--output"], "--output"),
        (["demo", "--model", "user/name", "--write-space"], "--write-space"),
        (["publish", "--checkpoint", "nowhere", "--card-only"], "--card-only"),
        (["demo-data"], "folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_at_once(words, option, here, capsys):
    (here / "link").symlink_to("not-there")
    for name, fact in (("source", "not a folder"), ("source/a", "not a folder"), ("link", "not-there")):
        assert main([*words, name]) == 1
        error = capsys.readouterr().err
        assert f"{option} {name}: " in error and fact in error and error.count("\n") == 1
    assert (here / "source").read_text() == "a dog\n"


@pytest.mark.parametrize("name", ["README.md", "curves.png"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_card_replaces_files_only(name, kind, here, capsys):
    (here / "card").mkdir()
    put(here / "card" / name, kind)
    assert main(["publish", "--checkpoint", "nowhere", "--card-only", "card"]) == 1
    assert f"--card-only card/{name}: is a {kind}" in capsys.readouterr().err


def test_a_space_replaces_no_link(here):
    (here / "space").mkdir()
    (here / "space" / "app.py").symlink_to("../nowhere")
    with pytest.raises(FileExistsError, match=r"space/app\.py"):
        write_space("user/name", "space", "6.31.0")
    assert [path.name for path in (here / "space").iterdir()] == ["app.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_data_replace_files_only(kind, here, capsys):
    (here / "data").mkdir()
    put(here / "data" / "train.de", kind)
    assert main(["demo-data", "data", "--train", "2", "--val", "1", "--test", "1"]) == 1
    assert f"data/train.de: is a {kind}" in capsys.readouterr().err
    assert not (here / "data" / "test.en").exists()


def test_an_average_grows_in_no_linked_folder(here, capsys):
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "precious").write_text("precious")
    (here / "mean").symlink_to("elsewhere")
    assert main(["average", "--checkpoints", "nowhere", "--output", "mean"]) == 1
    assert "mean exists" in capsys.readouterr().err
    assert [path.name for path in (here / "elsewhere").iterdir()] == ["precious"]
