"""A trained checkpoint from its card to its scores, over a Hub and back; printed with `pytest -m slow -s`.

CHECKPOINT names the checkpoint's folder and BASELINE another's, both trained on Multi30k En-De by the recipe
`multi30k_en_de`, whose folder MULTI30K names.
"""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard

from support.hub_client import connected
from support.hub_server import Hub
from training.cli import main


REPO = "user/multi30k-en-de"
METRICS = ["--metrics", "bleu", "chrf", "chrf++", "ter", "compound-bleu", "--tokenized", "--bootstrap"]
pytestmark = pytest.mark.slow


def folder_of(name: str) -> Path:
    if name not in os.environ:
        pytest.skip(f"{name} does not name a folder")
    return Path(os.environ[name])


def scored(capsys, *options: str) -> dict:
    capsys.readouterr()
    assert main(["score", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_card_scores_significance_and_attention_survive_the_way_to_the_hub_and_back(tmp_path, capsys):
    checkpoint, other, data = map(folder_of, ("CHECKPOINT", "BASELINE", "MULTI30K"))
    sources, references = (str(data / "lc_norm_tok" / f"test_2016_flickr.{lang}.gz") for lang in ("en", "de"))
    theirs, ours, pulled = (str(tmp_path / f"{name}.de") for name in ("baseline", "ours", "pulled"))
    files = ["--sources", sources, "--references", references]
    scored(capsys, "--model", str(other), *files, "--output", theirs, "--tokenized")
    with Hub({"hf_secret": "user"}) as hub, connected(hub, "hf_secret", tmp_path / "cache"):
        publish = ["publish", "--checkpoint", str(checkpoint), "--repo", REPO, "--languages", "en", "de"]
        publish += ["--test-sources", sources, "--test-references", references, "--tokenized"]
        assert main(publish) == 0
        commits = len(HfApi().list_repo_commits(REPO))
        assert main(publish) == 0
        assert len(HfApi().list_repo_commits(REPO)) == commits  # the second time, there was nothing to change

        options = [*files, *METRICS, "--baseline", theirs, "--paired-bootstrap", "1000"]
        here = scored(capsys, "--model", str(checkpoint), *options, "--output", ours)
        there = scored(capsys, "--model", REPO, *options, "--output", pulled)
        card = ModelCard.load(REPO)
    assert hub.failures == []

    assert Path(pulled).read_bytes() == Path(ours).read_bytes()
    assert there["comparisons"] == here["comparisons"] and here["comparisons"]
    figures = {figure["name"]: figure for figure in here["figures"]}
    assert {figure["name"]: figure["score"] for figure in there["figures"]} == {
        name: figure["score"] for name, figure in figures.items()
    }
    assert len(figures) == 7 and all(figure["interval"]["half_width"] > 0 for figure in figures.values())
    assert figures["compound-split BLEU"]["score"] != figures["tokenised BLEU"]["score"]
    assert "not comparable" in figures["compound-split BLEU"]["note"]
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results["tokenised BLEU"] == pytest.approx(figures["tokenised BLEU"]["score"], abs=0.005)

    page = tmp_path / "attention.html"
    sentence = "a man in an orange hat starring at something ."
    assert main(["attention", "--model", str(checkpoint), "--source", sentence, "--output", str(page)]) == 0
    assert all(word in page.read_text(encoding="utf-8") for word in sentence.split())
    with capsys.disabled():
        print()
        for figure in here["figures"]:
            interval = figure["interval"]
            print(f"{figure['name']}: {figure['score']:.4f}, {interval['mean']:.4f} ± {interval['half_width']:.4f}")
        for comparison in here["comparisons"]:
            print(comparison)
