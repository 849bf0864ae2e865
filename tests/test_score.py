import json

import pytest
import sacrebleu

from training.cli import main
from training.score import load_bleu, score


HYPOTHESES = ["the cat sat on the mat .", "a dog runs fast", "It's a test-case, isn't it?"]
REFERENCES = ["the cat sat on a mat .", "a dog is running very fast", "It's a test-case, is it not?"]


@pytest.fixture
def files(tmp_path):
    for name, lines in (("hyp", HYPOTHESES), ("ref", REFERENCES), ("ref2", HYPOTHESES[::-1])):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return tmp_path


def test_bleu_by_hand():
    """5 of 6 words, 3 of 5 pairs, 2 of 4 triples and 1 of 3 quadruples match, and the lengths are equal."""
    result = load_bleu().compute(predictions=["a b c d e f"], references=[["a b c d x f"]], tokenize="none")
    assert result["precisions"] == pytest.approx([500 / 6, 60, 50, 100 / 3])
    assert result["score"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert result["brevity_penalty"] == 1


def test_sacrebleu_and_its_signature(files):
    result = score(str(files / "hyp"), [str(files / "ref")])
    assert result["metric"] == "sacreBLEU"
    assert result["score"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert result["signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"


def test_tokenised_bleu_is_another_figure_and_says_so(files):
    result = score(str(files / "hyp"), [str(files / "ref")], tokenized=True)
    assert result["metric"] == "tokenised BLEU"
    assert "tok:none" in result["signature"]
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize="none", force=True).score
    assert result["score"] == expected != score(str(files / "hyp"), [str(files / "ref")])["score"]


def test_several_references(files):
    result = score(str(files / "hyp"), [str(files / "ref"), str(files / "ref2")])
    assert "nrefs:2" in result["signature"]
    assert result["score"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, HYPOTHESES[::-1]]).score


def test_command_prints_score_and_signature(files, capsys):
    words = ["score", "--hypotheses", str(files / "hyp"), "--references", str(files / "ref")]
    assert main(words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"sacreBLEU = {sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score:.2f} (")
    assert second.startswith("nrefs:1|case:mixed")
    assert main([*words, "--json", "--lowercase"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["sentences"], "case:lc" in result["signature"]) == (3, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [("one\n", "hyp has 3 lines, .*ref has 1"), ("", "ref: empty file"), (None, "ref: no such file")],
)
def test_what_is_wrong_with_the_files_is_named(files, capsys, text, message):
    (files / "ref").unlink() if text is None else (files / "ref").write_text(text)
    assert main(["score", "--hypotheses", str(files / "hyp"), "--references", str(files / "ref")]) == 1
    assert __import__("re").search(message, capsys.readouterr().err)
