"""A Hub that does not answer: commands fail at once, and cached copies load."""

import json
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants, snapshot_download

from support.hub_client import ALICE, connected
from support.models import new_model
from training.cli import main
from training.data.pairs import load_hub_pairs


CLOSED = "http://127.0.0.1:1"


@pytest.fixture
def silent():
    """A server that takes every connection and never answers."""
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take():
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.getsockname()[1]}", taken=taken)
        server.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


@pytest.fixture
def unreachable(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with connected(SimpleNamespace(url=CLOSED), ALICE, tmp_path / "cache"):
        yield


def commands(folder) -> dict[str, list[str]]:
    (folder / "en").write_text("the man sleeps\n")
    (folder / "de").write_text("der Mann schläft\n")
    run = ["--output_dir", str(folder / "run"), "--max_steps", "1", "--report_to", "none"]
    run += ["--source_tokens_per_update", "500", "--target_tokens_per_update", "500"]
    files = ["--train_files", str(folder / "en"), str(folder / "de")]
    return {
        "translate": ["translate", "--model", "user/name", "--input", str(folder / "en")],
        "dataset_name": ["train", "--dataset_name", "user/name", *run],
        "init_from": ["train", "--init_from", "user/name", *files, *run],
        "tokenizer_from": ["train", "--tokenizer_from", "user/name", *files, *run],
    }


@pytest.mark.parametrize("command", ["translate", "dataset_name", "init_from", "tokenizer_from"])
def test_a_hub_that_cannot_be_reached_is_one_line_without_retries(command, unreachable, waits, tmp_path, capsys):
    assert main(commands(tmp_path)[command]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-vaswani ")]
    assert all(fact in line for fact in ("user/name", CLOSED, "cache")), line
    assert waits == []


def test_a_hub_that_never_answers_is_asked_once(silent, waits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    with connected(silent, ALICE, tmp_path / "cache"):
        assert main(commands(tmp_path)["translate"]) == 1
    assert f"{silent.url} does not answer" in capsys.readouterr().err
    assert len(silent.taken) == 1 and waits == []


def test_a_cached_copy_loads_where_the_hub_cannot_be_reached(hub, tokenizer, waits, tmp_path, capsys):
    new_model(tokenizer, seed=1).push_to_hub("alice/cached")
    tokenizer.push_to_hub("alice/cached")
    snapshot_download("alice/cached", cache_dir=tmp_path / "cache")
    (tmp_path / "en").write_text("the man sleeps\n")
    words = ["translate", "--model", "alice/cached", "--input", str(tmp_path / "en")]
    assert main(words) == 0
    expected = capsys.readouterr().out
    with connected(SimpleNamespace(url=CLOSED), ALICE, tmp_path / "cache"):
        assert main(words) == 0
    assert capsys.readouterr().out == expected != ""
    assert waits == []


def test_a_gateway_without_the_hub_is_named(waits, tmp_path, capsys):
    class Gateway(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(502)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with connected(SimpleNamespace(url=url), ALICE, tmp_path / "cache"):
            assert main(commands(tmp_path)["translate"]) == 1
        server.shutdown()
    assert f"{url} answers with the error 502" in capsys.readouterr().err
    assert waits == []


def test_a_cached_data_set_loads_where_the_hub_cannot_be_reached(unreachable, waits, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"en": "the man sleeps", "de": "der Mann schläft"}\n')
    datasets.load_dataset(str(tmp_path / "data"))
    [configuration] = (tmp_path / "datasets" / "data").iterdir()
    shutil.copytree(configuration, tmp_path / "datasets" / "user___data" / "default")
    pairs = load_hub_pairs("user/data", None, "train", "en", "de")
    assert pairs[0] == {"source": "the man sleeps", "target": "der Mann schläft"} and waits == []


def test_offline_mode_is_named(unreachable, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:2")  # asked with another answer before
    assert main(commands(tmp_path)["translate"]) == 1
    assert "user/name" in (error := capsys.readouterr().err) and "HF_HUB_OFFLINE" in error


@pytest.mark.parametrize("what", ["connection", "token"])
def test_publishing_checks_hub_and_token_before_anything_else(what, hub, tmp_path, monkeypatch, waits, capsys):
    """Before the checkpoint is read, which does not exist."""
    words = ["publish", "--checkpoint", str(tmp_path / "none"), "--repo", "alice/model"]
    with connected(SimpleNamespace(url=CLOSED if what == "connection" else hub.url), ALICE, tmp_path):
        if what == "token":
            monkeypatch.delenv("HF_TOKEN")
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        assert main(words) == 1
    error = capsys.readouterr().err
    assert (f"{CLOSED} does not answer" if what == "connection" else "HF_TOKEN") in error and error.count("\n") == 1
    assert waits == []


def test_a_local_data_set_needs_no_hub(unreachable, tmp_path):
    row = {"translation": {"en": "the man sleeps", "de": "der Mann schläft"}}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps(row) + "\n")
    pairs = load_hub_pairs(str(tmp_path / "set"), None, "train", "en", "de")
    assert pairs[0] == {"source": "the man sleeps", "target": "der Mann schläft"}
