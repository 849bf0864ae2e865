"""Files that commands write: what is refused at the start, and atomic writes."""

import errno
import gzip
import io
import os
import secrets
import socket
from pathlib import Path

import pytest

from training.files import check_output, check_output_folder, write_whole, written_whole


def symbolic_link(path: Path):
    path.with_name("target").write_text("precious")
    path.symlink_to("target")


def dangling_link(path: Path):
    path.symlink_to("nowhere/target")


def listening_socket(path: Path):
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (symbolic_link, ["symbolic link", "target"]),
        (dangling_link, ["symbolic link", "nowhere/target"]),
        (Path.mkdir, ["folder"]),
        (os.mkfifo, ["FIFO"]),
        (listening_socket, ["socket"]),
    ],
)
def test_what_is_no_regular_file_is_named_and_stays(make, facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "out")
    before = (tmp_path / "out").lstat()
    with pytest.raises(OSError) as error:
        check_output("out", option="--to")
    assert all(fact in str(error.value) for fact in ["--to out", *facts])
    assert (tmp_path / "out").lstat() == before


def test_a_device_is_named_and_may_be_a_stream():
    _, terminal = os.openpty()
    name = os.ttyname(terminal)
    with pytest.raises(FileExistsError, match=f"--output {name}: is a device"):
        check_output(name)
    check_output(name, streams=True)


@pytest.mark.parametrize(
    ("name", "kind", "facts"),
    [
        ("nowhere/out", FileNotFoundError, "no such folder: nowhere"),
        ("file/out", NotADirectoryError, "file is not a folder"),
        ("", IsADirectoryError, "''"),
        ("folder/", IsADirectoryError, "'folder/'"),
        (".", IsADirectoryError, "is a folder"),
        ("o" * 250, OSError, os.strerror(errno.ENAMETOOLONG)),  # with the ending of what grows beside it
    ],
)
def test_a_name_that_nothing_can_be_written_to_is_refused(name, kind, facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(kind, match=facts):
        check_output(name)


@pytest.mark.parametrize(("protected", "facts"), [("out", "write-protected"), ("", "folder")])
def test_what_may_not_be_written_is_refused(protected, facts, tmp_path, monkeypatch):
    (tmp_path / "out").write_text("precious")
    access = os.access  # which root always has
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / protected and access(path, mode))
    with pytest.raises(PermissionError, match=facts):
        check_output(tmp_path / "out")


def test_an_input_by_any_name_is_no_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "in").write_text("precious")
    (folder / "in2").hardlink_to(folder / "in")
    (folder / "other").write_text("")
    for name in ("folder/in", folder / "in", "folder/../folder/in", "link/in", "folder/in2"):
        with pytest.raises(ValueError, match=rf"--output {name}: is the same file as the input folder/in,"):
            check_output(name, [None, "not-there", "folder/in"])
    check_output("folder/other", [None, "-", "not-there", "folder/in"])
    check_output("folder/new", ["folder/in", "folder/new"])


def test_files_of_a_model_are_inputs_and_others_in_its_folder_are_not(tmp_path):
    for name in ("config.json", "model.safetensors", "translated.de"):
        (tmp_path / name).write_text("")
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(ValueError, match=name):
            check_output(tmp_path / name, [tmp_path])
    check_output(tmp_path / "translated.de", [tmp_path])


def test_the_standard_input_is_an_input(tmp_path):
    (tmp_path / "in").write_text("precious")
    earlier = os.dup(0)
    try:
        with open(tmp_path / "in") as file:
            os.dup2(file.fileno(), 0)
        with pytest.raises(ValueError, match="standard input"):
            check_output(tmp_path / "in", ["-"])
    finally:
        os.dup2(earlier, 0)
        os.close(earlier)


def test_a_folder_is_made_where_one_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("", "a", "a/b/c", "link", "link/a"):
        check_output_folder(tmp_path / name)
    for name, facts in (("file", "not a folder"), ("file/a", "not a folder"), ("dangling", "nowhere")):
        with pytest.raises(OSError, match=facts):
            check_output_folder(tmp_path / name)


def test_a_symbolic_link_is_not_written_through(tmp_path, monkeypatch):
    """One in the place of the file is replaced; of one in the place of what grows, nothing is written."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").symlink_to("precious")
    write_whole(tmp_path / "out", "new")
    assert (tmp_path / "out").read_text() == "new" and not (tmp_path / "out").is_symlink()

    monkeypatch.setattr(secrets, "token_hex", lambda length: "guessed")
    (tmp_path / "out.guessed.partial").symlink_to("precious")
    with pytest.raises(FileExistsError, match="guessed"):
        write_whole(tmp_path / "out", "newer")
    assert (tmp_path / "out").read_text() == "new"
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    (tmp_path / "out").write_text("before")
    with pytest.raises(RuntimeError), written_whole(tmp_path / "out") as file:
        file.write(b"half")
        raise RuntimeError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out": "before"}


def test_a_name_that_ends_in_gz_is_written_compressed(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_whole(tmp_path / name, "Grüße\n" * 1000)
    data = (tmp_path / "a.gz").read_bytes()
    assert len(data) < 200
    assert gzip.GzipFile(fileobj=io.BytesIO(data)).read() == "Grüße\n".encode() * 1000
    assert (tmp_path / "b.gz").read_bytes() == data  # no name
    assert data[4:8] == bytes(4)  # no time (RFC 1952, section 2.3)
