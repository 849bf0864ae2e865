import json
import re
import urllib.error
import urllib.request

import pytest
from sacrebleu.dataset import DATASETS

from training.cli import main


@pytest.fixture
def wmt14(tmp_path, monkeypatch):
    """WMT14 as on a machine that has never downloaded it, without a network."""

    def unreachable(*_args, **_kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(DATASETS["wmt14"], "_outdir", str(tmp_path / "wmt14"))
    monkeypatch.setattr(DATASETS["wmt14"], "_rawdir", str(tmp_path / "wmt14" / "raw"))
    (tmp_path / "hyp").write_text("Ein Hund läuft schnell weg.\n", encoding="utf-8")
    return tmp_path


def test_without_a_network_the_files_are_named_and_can_be_put_there(wmt14, capsys):
    words = ["score", "--hypotheses", str(wmt14 / "hyp"), "--test-set", "wmt14/en-de", "--by-length", "--json"]
    assert main(words) == 1
    message = capsys.readouterr().err
    source, reference = (str(wmt14 / "wmt14" / f"wmt14.en-de.{side}") for side in ("src", "ref"))
    assert "http" in message and "no network" in message and f"at {source} and {reference}" in message
    for file, text in ((source, "A dog runs away quickly.\n"), (reference, "Ein Hund läuft sehr schnell weg.\n")):
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["system"] == f"{wmt14 / 'hyp'} on wmt14/en-de"
    assert (result["sentences"], result["length_of"], result["reference_length"]) == (1, "sources", 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wmt14", "no test set ''"),
        ("wmt94/en-de", "no test set 'wmt94'"),
        ("wmt14/en-xx", "wmt14 has no language pair 'en-xx'.*en-de"),
    ],
)
def test_an_unknown_test_set_is_named(wmt14, capsys, name, message):
    assert main(["score", "--hypotheses", str(wmt14 / "hyp"), "--test-set", name]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_a_language_without_compound_bleu_is_named_before_the_work(wmt14, capsys):
    """The model, which is not there, would translate first."""
    words = ["score", "--model", str(wmt14 / "no-model"), "--test-set", "wmt14/en-fr", "--metrics", "compound-bleu"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "Compound-split BLEU" in error and "de, en, got 'fr'" in error and error.count("\n") == 1


def test_chinese_is_tokenised_as_sacrebleu_does(wmt14, monkeypatch, capsys):
    """sacreBLEU takes its tokenisation for Chinese unless told otherwise."""
    monkeypatch.setattr(DATASETS["wmt17"], "_outdir", str(wmt14))
    for side in ("src", "ref"):
        (wmt14 / f"wmt17.en-zh.{side}").write_text("一只狗跑得很快\n", encoding="utf-8")
    (wmt14 / "hyp").write_text("一只狗跑得很快\n", encoding="utf-8")
    words = ["score", "--hypotheses", str(wmt14 / "hyp"), "--test-set", "wmt17/en-zh", "--metrics", "bleu", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert "tok:zh" in result["signature"]
    assert (result["score"], result["hypothesis_length"]) == (pytest.approx(100), 7)
