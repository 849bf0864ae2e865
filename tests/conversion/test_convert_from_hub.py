"""hf-vaswani convert user/model, from a Hub on this machine, and the guide's commands on the result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import MarianMTModel, MarianTokenizer

from support.foreign_models import marian_model
from support.hub_client import ALICE, BOB
from support.paths import ROOT
from support.sentencepiece_models import write_marian
from training.cli import main


README = "---\nlicense: cc-by-4.0\nlanguage: [en, de]\n---\n\n# Like OPUS-MT\n"
# In a process of its own, whose environment is all that it is told.
RUN = """
import json, sys
from training.cli import main
for words in json.loads(sys.argv[1]):
    print(f"$ {words[0]}", flush=True)
    if (status := main(words)) != 0:
        sys.exit(status)
"""


@pytest.fixture(scope="module")
def opus(tmp_path_factory, pairs) -> Path:
    """A MarianMT checkpoint with two SentencePiece models and a model card."""
    folder = tmp_path_factory.mktemp("opus")
    write_marian(folder, *zip(*pairs))
    marian_model(vocab_size=len(json.loads((folder / "vocab.json").read_text()))).save_pretrained(folder)
    (folder / "README.md").write_text(README)
    return folder


@pytest.fixture(scope="module")
def repository(hub, opus) -> str:
    api = HfApi()
    api.create_repo("alice/opus-like")
    api.upload_folder(repo_id="alice/opus-like", folder_path=opus)
    return "alice/opus-like"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    """Empty, so that what a test converts comes from the server."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def error_of(capsys) -> str:
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-vaswani convert: ")]
    return line


@pytest.mark.slow
def test_the_guides_commands_run_on_a_model_of_the_hub(hub, repository, opus, pairs, tmp_path):
    """Without a token, with an empty cache."""
    sources, targets = ([" ".join(pair[side].split()[:6]) for pair in pairs[:4]] for side in (0, 1))
    for name, lines in (("test.en", sources), ("test.de", targets)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = ["--sources", "test.en", "--translations", "test.de"]
    commands = [
        ["convert", repository, "opus"],
        ["translate", "--model", "opus", "--input", "test.en", "--output", "out.de"],
        ["score", "--hypotheses", "out.de", "--references", "test.de", "--metrics", "bleu"],
        ["score-pairs", "--model", "opus", *files],
        ["align", "--model", "opus", *files, "--method", "erasure"],
        ["attention", "--model", "opus", "--source", sources[0], "--output", "attention.html"],
        ["publish", "--checkpoint", "opus", "--card-only", "card"],
        ["convert", "opus", "back", "--to", "marian"],
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment |= {
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    line = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = {name: text.splitlines() for name, _, text in (each.partition("\n") for each in done.stdout.split("$ "))}
    assert not [
        request for request in hub.requests if request.path.startswith("/alice/opus-like/resolve") and request.token
    ]

    tokenizer, marian = MarianTokenizer.from_pretrained(opus), MarianMTModel.from_pretrained(opus).eval()
    expected = [marian.generate(**tokenizer(line, return_tensors="pt"))[0] for line in sources]
    found = (tmp_path / "out.de").read_text(encoding="utf-8").splitlines()
    assert found == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert len(printed["score-pairs"]) == len(printed["align"]) == 4
    assert all(float(number) < 0 for number in printed["score-pairs"])
    assert any("sacreBLEU" in line for line in printed["score"])
    card = ModelCard.load(tmp_path / "card" / "README.md")
    assert (card.data.base_model, card.data.license) == (repository, "cc-by-4.0")
    back = MarianMTModel.from_pretrained(tmp_path / "back").state_dict()
    assert all(back[name].equal(weight) for name, weight in marian.state_dict().items())


def test_a_revision_and_its_commit_are_recorded(hub, repository, opus, cache, tmp_path):
    first = hub.repositories[repository].at("main").id
    HfApi().create_tag(repository, tag="v1", revision=first)
    HfApi().upload_file(repo_id=repository, path_or_fileobj=b"---\nlicense: mit\n---\n", path_in_repo="README.md")
    for revision, commit, stated in (("v1", first, "cc-by-4.0"), (None, None, "mit")):
        words = ["--revision", revision] if revision else []
        assert main(["convert", repository, str(tmp_path / stated), *words]) == 0
        record = json.loads((tmp_path / stated / "converted_from.json").read_text())
        commit = commit or hub.repositories[repository].at("main").id
        assert (record["revision"], record["commit"], record["license"]) == (revision, commit, stated)


def test_a_private_repository_is_converted_with_its_owners_token_only(hub, opus, cache, tmp_path, capsys, monkeypatch):
    api = HfApi()
    api.create_repo("alice/secret", private=True)
    api.upload_folder(repo_id="alice/secret", folder_path=opus)
    for token in (None, BOB):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
        assert main(["convert", "alice/secret", str(tmp_path / "out")]) == 1
        error = error_of(capsys)
        assert "alice/secret" in error and "private" in error and "hf auth login" in error
        assert ALICE not in error and not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", ALICE)
    assert main(["convert", "alice/secret", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "converted_from.json").read_text())["repository"] == "alice/secret"


def test_a_revision_that_is_missing_is_named(hub, repository, cache, tmp_path, capsys):
    assert main(["convert", repository, str(tmp_path / "out"), "--revision", "v9"]) == 1
    error = error_of(capsys)
    assert repository in error and "--revision v9" in error and "http" not in error
