import json
import os
import random
import re
import subprocess
import sys

import pytest
import sacrebleu

from training.cli import main
from training.evaluation.metrics import METRICS, build_metrics, measure
from training.evaluation.modules import load_bleu, load_metrics, score


HYPOTHESES = ["the cat sat on the mat .", "a dog runs fast", "It's a test-case, isn't it?"]
REFERENCES = ["the cat sat on a mat .", "a dog is running very fast", "It's a test-case, is it not?"]


@pytest.fixture
def files(tmp_path):
    for name, lines in (("hyp", HYPOTHESES), ("ref", REFERENCES), ("ref2", HYPOTHESES[::-1])):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def corpus(pairs, tmp_path_factory):
    """References, and translations with a few and with many of their words changed."""
    folder, words = tmp_path_factory.mktemp("corpus"), random.Random(5)
    german = [text for _, text in pairs[:120]]

    def noise(text: str, share: float) -> str:
        return " ".join(word if words.random() > share else f"{word[::-1]}-Ding" for word in text.split())

    for name, share in (("ref", 0), ("ref2", 0.3), ("system", 0.1), ("close", 0.12), ("baseline", 0.4)):
        (folder / name).write_text("".join(noise(text, share) + "\n" for text in german), encoding="utf-8")
    return folder


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


def test_the_command_prints_a_table_with_signatures(files, capsys):
    words = ["score", "--hypotheses", str(files / "hyp"), "--references", str(files / "ref")]
    assert main(words) == 0
    header, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split() == ["metric", "score", "signature"]
    assert [row.split()[0] for row in rows] == ["sacreBLEU", "chrF", "chrF++", "TER"]
    assert rows[0].split()[1] == f"{sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score:.2f}"
    assert rows[0].split()[2].startswith("nrefs:1|case:mixed")
    assert main([*words, "--json", "--lowercase"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["metric"], result["sentences"], "case:lc" in result["signature"]) == ("sacreBLEU", 3, True)
    assert result["score"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True).score


def test_markdown_keeps_signs_from_becoming_markup(files, capsys):
    (files / "hyp").write_text("a|b *c* <d> snake_case and more\nx\ny\n", encoding="utf-8")
    words = ["--hypotheses", str(files / "hyp"), "--references", str(files / "ref"), "--examples", "3"]
    assert main(["score", *words, "--markdown"]) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in table} == {5}  # three cells
    assert r"translation: a\|b \*c\* \<d\> snake\_case and more" in out


@pytest.mark.parametrize(
    ("options", "sacrebleu_options", "names"),
    [
        ([], ["-m", "bleu", "chrf", "ter"], ["sacreBLEU", "chrF", "TER"]),
        (["--tokenize", "char"], ["-tok", "char"], ["sacreBLEU"]),
        (["--tokenized"], ["-tok", "none", "--force"], ["tokenised BLEU"]),
        (
            ["--tokenize", "intl", "--lowercase", "--bootstrap", "50", "--seed", "7"],
            [
                "-m",
                "bleu",
                "chrf",
                "-tok",
                "intl",
                "-lc",
                "--chrf-lowercase",
                "--chrf-word-order",
                "2",
                "-ci",
                "-cin",
                "50",
            ],
            ["sacreBLEU", "chrF++"],
        ),
    ],
)
def test_figures_are_those_of_the_sacrebleu_command(corpus, capsys, options, sacrebleu_options, names):
    """To the last digit, with signature and interval, against two references."""
    references, system = [str(corpus / name) for name in ("ref", "ref2")], str(corpus / "system")
    command = [sys.executable, "-m", "sacrebleu", *references, "-i", system, *sacrebleu_options, "-w", "12"]
    environment = {**os.environ, "SACREBLEU_SEED": "7", "SACREBLEU_FORMAT": "json"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    expected = json.loads(done.stdout)
    expected = expected if isinstance(expected, list) else [expected]
    assert main(["score", "--hypotheses", system, "--references", *references, *options, "--json"]) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert len(expected) == len(names)
    for name, theirs in zip(names, expected):
        ours = figures[name]
        assert f"{ours['score']:.12f}" == f"{theirs['score']:.12f}"
        assert ours["signature"] == theirs["signature"]
        if "-ci" in sacrebleu_options:
            assert ours["interval"]["mean"] == theirs["confidence_mean"]
            assert ours["interval"]["half_width"] == theirs["confidence_var"]
        else:
            assert ours["interval"] is None


def test_resamples_without_a_match_are_resamples_too():
    """One sentence of two is empty: a fourth of the resamples have nothing that matches, and chrF 0."""
    metrics = build_metrics(("chrf", "chrf++"))
    for figure in measure(metrics, ["ein Hund", ""], [["ein Hund", "xyz"]], n_bootstrap=1000):
        assert figure.interval.half_width == pytest.approx(50)
        assert 0 < figure.interval.mean < 100


@pytest.mark.parametrize(("test", "flag"), [("bootstrap", "--paired-bs"), ("randomization", "--paired-ar")])
def test_p_values_are_those_of_the_sacrebleu_command(corpus, capsys, test, flag):
    """Its tables have four digits of them; its JSON cannot be had of the bootstrap."""
    reference, systems = str(corpus / "ref"), [str(corpus / name) for name in ("close", "system")]
    command = [sys.executable, "-m", "sacrebleu", reference, "-i", *systems, flag, f"{flag}-n", "200"]
    command += ["-m", "bleu", "chrf", "-w", "6", "-f", "latex"]
    environment = {**os.environ, "SACREBLEU_SEED": "7", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    [row] = [line for line in done.stdout.splitlines() if "(p = " in line]
    cells = [re.match(r" *([\d.]+).*\(p = ([\d.]+)\)", cell).groups() for cell in row.split("&")[1:]]
    words = ["--hypotheses", systems[1], "--references", reference, "--baseline", systems[0], "--seed", "7"]
    words += ["--metrics", "bleu", "chrf", f"--paired-{test}", "200", "--json"]
    assert main(["score", *words]) == 0
    compared = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(f"{c['score']:.6f}", f"{c['p_values'][test]:.4f}") for c in compared] == cells
    assert all("seed:7" in c["signatures"][test] and "200" in c["signatures"][test] for c in compared)
    assert any(0.01 < c["p_values"][test] < 0.99 for c in compared)
    assert os.environ.get("SACREBLEU_SEED") != "7"


def test_a_difference_shows_and_none_does_not(corpus, capsys):
    """The baseline has many more wrong words; against itself, a system is no different."""
    words = ["--hypotheses", str(corpus / "system"), "--references", str(corpus / "ref")]
    words += ["--metrics", "bleu", "compound-bleu", "--paired-bootstrap", "300", "--paired-randomization", "300"]
    words += ["--baseline", str(corpus / "baseline"), str(corpus / "system"), "--json"]
    assert main(["score", *words]) == 0
    compared = json.loads(capsys.readouterr().out)["comparisons"]
    assert [entry["metric"] for entry in compared] == ["sacreBLEU", "compound-split BLEU"] * 2
    for entry in compared[:2]:
        assert max(entry["p_values"].values()) < 0.01 and entry["score"] > entry["baseline_score"]
    for entry in compared[2:]:
        assert set(entry["p_values"].values()) == {1} and entry["score"] == entry["baseline_score"]


def test_compound_split_bleu_says_what_it_is_not(files, capsys):
    (files / "hyp").write_text("Der alte Mann sieht ein rot-blaues Auto.\n", encoding="utf-8")
    (files / "ref").write_text("Der alte Mann sieht ein rot-weißes Auto.\n", encoding="utf-8")
    words = ["--hypotheses", str(files / "hyp"), "--references", str(files / "ref")]
    assert main(["score", *words, "--metrics", "bleu", "compound-bleu"]) == 0
    out = capsys.readouterr().out
    by_hand = {"sacreBLEU": 7 / 8 * 5 / 7 * 3 / 6 * 2 / 5, "compound-split BLEU": 9 / 10 * 7 / 9 * 5 / 8 * 4 / 7}
    for name, product in by_hand.items():
        assert re.search(rf"^{name} +{100 * product**0.25:.2f} ", out, re.M)
    assert "compound-split BLEU: the paper's metric" in out and "not comparable with sacreBLEU" in out


def test_compound_split_bleu_ignores_case_if_asked(files, capsys):
    (files / "hyp").write_text("Der alte Mann sieht ein Auto.\n", encoding="utf-8")
    (files / "ref").write_text("der ALTE mann Sieht ein auto.\n", encoding="utf-8")
    words = ["score", "--hypotheses", str(files / "hyp"), "--references", str(files / "ref")]
    assert main([*words, "--metrics", "compound-bleu", "--lowercase", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["score"] == pytest.approx(100) and "case:lc" in result["signature"]


def test_scores_by_length(files, capsys):
    """The sources have 2, 3 and 6 words; within its bucket each line is scored alone."""
    (files / "src").write_text("a b\na b c\na b c d e f\n", encoding="utf-8")
    words = ["--hypotheses", str(files / "hyp"), "--references", str(files / "ref"), "--sources", str(files / "src")]
    assert main(["score", *words, "--metrics", "chrf", "--by-length", "2", "4", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["length_of"] == "sources"
    found = [(b["shortest"], b["longest"], b["sentences"], b["scores"].get("chrF")) for b in result["buckets"]]
    alone = [sacrebleu.corpus_chrf([text], [[reference]]).score for text, reference in zip(HYPOTHESES, REFERENCES)]
    assert found == [(0, 2, 1, alone[0]), (3, 4, 1, alone[1]), (5, 5, 0, None), (6, None, 1, alone[2])]
    assert main(["score", *words[:4], "--by-length"]) == 0  # by the references' 6, 6 and 7 words
    assert re.search(r"length of the first references.*\n\n.*\n0-10 +3 .*\n11-20 +0 +-", capsys.readouterr().out)


@pytest.mark.parametrize("by", ["chrf", "bleu"])
def test_worst_and_best_sentences(files, capsys, by):
    (files / "hyp").write_text("the cat sat on a mat .\n\nIt's a test-case, is it?\n", encoding="utf-8")
    (files / "src").write_text("one\ntwo\nthree\n", encoding="utf-8")
    words = ["--hypotheses", str(files / "hyp"), "--references", str(files / "ref"), "--sources", str(files / "src")]
    assert main(["score", *words, "--examples", "1", "--examples-by", by, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["empty"] == 1
    [worst], [best] = result["worst"], result["best"]
    assert (worst["line"], worst["score"], worst["source"], worst["hypothesis"]) == (2, 0, "two", "")
    assert (best["line"], best["source"], best["references"]) == (1, "one", [REFERENCES[0]])
    assert best["score"] == pytest.approx(100)
    assert main(["score", *words, "--examples", "9"]) == 0
    lines = re.findall(r"^line (\d)", capsys.readouterr().out, re.M)
    assert lines == ["2", "3", "1"]  # each once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n", "hyp has 3 lines, .*ref has 1: .*hyp:2 has no counterpart"),
        ("one\n" * 5, "hyp has 3 lines, .*ref has 5: .*ref:4 has no counterpart"),
        ("", "ref: empty file"),
        (None, "ref: no such file"),
        ("one\n \nthree\n", "ref:2: empty reference"),
        (b"one\ntwo\n\xff\n", "ref:3: byte 0xff at column 1 is not UTF-8"),
    ],
)
def test_what_is_wrong_with_the_files_is_named(files, capsys, text, message):
    if text is None:
        (files / "ref").unlink()
    else:
        (files / "ref").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["score", "--hypotheses", str(files / "hyp"), "--references", str(files / "ref")]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--sources", "--baseline"])
def test_every_file_has_to_be_parallel(files, capsys, option):
    (files / "other").write_text("one\ntwo\n")
    words = ["--hypotheses", str(files / "hyp"), "--references", str(files / "ref"), option, str(files / "other")]
    assert main(["score", *words]) == 1
    assert re.search("hyp has 3 lines, .*other has 2: .*hyp:3 has", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--references r", "give --hypotheses, or a --model"),
        ("--hypotheses h", "one of the arguments --references --test-set is required"),
        ("--hypotheses h --references r --model m", "--model needs --sources"),
        ("--hypotheses h --references r --comet", "--comet needs --sources"),
        ("--hypotheses h --references r --tokenized --tokenize intl", "only one of them"),
        ("--hypotheses h --references r --by-length 9 5", "got 9 5"),
        ("--hypotheses h --references r --bootstrap 1", "at least 2"),
        ("--hypotheses h --references r --sources s --comet --tokenized", "--comet takes raw text"),
        ("--hypotheses h --references r --output o", "--output o: needs a --model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, words, message):
    with pytest.raises(SystemExit):
        main(["score", *words.split()])
    assert message in capsys.readouterr().err


def test_the_evaluate_module_has_the_commands_figures(corpus, capsys):
    hypotheses, reference = ((corpus / name).read_text().splitlines() for name in ("system", "ref"))
    found = load_metrics().compute(
        predictions=hypotheses,
        references=[[text] for text in reference],
        metrics=list(METRICS),
        n_bootstrap=20,
        seed=3,
    )
    words = ["--hypotheses", str(corpus / "system"), "--references", str(corpus / "ref"), "--json"]
    assert main(["score", *words, "--metrics", *METRICS, "--bootstrap", "20", "--seed", "3"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert len(figures) == len(found) == 5
    for figure, result in zip(figures, found.values()):
        assert (figure["score"], figure["signature"]) == (result["score"], result["signature"])
        assert figure["interval"]["half_width"] == result["half_width"] > 0
        assert 0 < figure["score"] < 100
    with pytest.raises(ValueError, match="metric 'meteor'"):
        load_metrics().compute(predictions=["a"], references=[["a"]], metrics=["meteor"])
    with pytest.raises(ValueError, match="tokenisation 'moses'"):
        load_metrics().compute(predictions=["a"], references=[["a"]], tokenize="moses")
