"""The tour of hf_vaswani/README.md and CITATION.cff: sessions print what they show, and quotations are found."""

import doctest
import re

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

import hf_vaswani
from support.paths import ROOT


TOUR = ROOT / "hf_vaswani" / "README.md"
TEXT = TOUR.read_text(encoding="utf-8")
FENCES = [token for token in MarkdownIt().parse(TEXT) if token.type in ("fence", "code_block")]
QUOTATIONS = [token.content for token in FENCES if token.info == "python"]
SECTIONS = ["3.1", "3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "4", "5.1", "5.3", "5.4", "6.1", "Table 3:"]


def sessions(markdown: str) -> doctest.DocTest:
    """All sessions as one doctest, with the names of one another and the lines of the file."""
    lines = [""] * len(markdown.splitlines())
    for token in MarkdownIt().parse(markdown):
        if token.type == "fence" and token.info == "pycon":
            first, last = token.map
            lines[first + 1 : last - 1] = token.content.splitlines()
    return doctest.DocTestParser().get_doctest("\n".join(lines) + "\n", {}, TOUR.name, str(TOUR), 0)


def run(test: doctest.DocTest) -> tuple[doctest.TestResults, str]:
    report: list[str] = []
    with torch.enable_grad():  # and as it was, afterwards
        results = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return results, "".join(report)


def normalised(code: str) -> str:
    return " ".join(code.split())


def missing_excerpts(quotation: str) -> list[str]:
    """Excerpts, separated by lines of `...`, that are not in the file that the first line names."""
    first, *lines = quotation.splitlines()
    source = normalised((ROOT / first.removeprefix("# ")).read_text(encoding="utf-8"))
    excerpts = [normalised(excerpt) for excerpt in re.split(r"^\.\.\.$", "\n".join(lines), flags=re.MULTILINE)]
    assert all(len(excerpt) > 20 for excerpt in excerpts), quotation
    return [excerpt for excerpt in excerpts if excerpt not in source]


def test_the_sessions_print_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results, report = run(sessions(TEXT))
    assert results.failed == 0, report
    assert results.attempted == TEXT.count("\n>>> ") > 80


@pytest.mark.parametrize("quotation", QUOTATIONS, ids=lambda code: normalised(code)[-30:])
def test_quoted_lines_are_in_their_file(quotation):
    assert missing_excerpts(quotation) == []


def test_every_block_is_a_session_or_a_quotation_and_every_section_has_a_session():
    assert {token.info for token in FENCES} == {"pycon", "python"}
    assert all(token.content.startswith(">>> ") for token in FENCES if token.info == "pycon")
    headings = re.split(r"^### ", TEXT.split("\n## ")[1], flags=re.MULTILINE)[1:]
    assert [heading.split(" ")[0] for heading in headings] == [section.split(" ")[0] for section in SECTIONS]
    for heading in headings:
        assert "```pycon" in heading and "By hand:" in heading, heading.splitlines()[0]


def test_a_wrong_number_or_a_changed_line_is_found():
    wrong = "# Title\n\n```pycon\n>>> 1 + 1\n2\n>>> 7 ** 2\n48\n```\n"
    results, report = run(sessions(wrong))
    assert (results.failed, results.attempted) == (1, 2)
    assert 'README.md", line 6,' in report and "48" in report and "49" in report
    quotation = "# training/paper.py\nreturn (d_model * warmup_steps) ** -0.25\n"
    assert missing_excerpts(quotation) == ["return (d_model * warmup_steps) ** -0.25"]


def test_links_lead_somewhere():
    headings = re.findall(r"^#+ (.+)$", TEXT, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 5
    for link in links:
        path, _, anchor = link.partition("#")
        if path:
            assert path.startswith("https://") or (TOUR.parent / path).exists(), link
        else:
            assert anchor in anchors, link


def test_the_citation_is_of_this_version_and_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"]) == ("hf-vaswani", hf_vaswani.__version__)
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The hf-vaswani authors"}]
    [paper] = citation["references"]
    assert (paper["title"], paper["year"], paper["volume"]) == ("Attention Is All You Need", 2017, 30)
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Vaswani", "Shazeer", "Parmar", "Uszkoreit", "Jones", "Gomez", "Kaiser", "Polosukhin"]
