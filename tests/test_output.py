"""Files that are there whole or not at all, when the disk becomes full while they are written."""

import errno
import json
import os
from pathlib import Path

import pytest
from test_translate import noisy_model

from training.cli import main


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("read")
    for part in (noisy_model(tokenizer, max_extra_tokens=3), tokenizer):
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
