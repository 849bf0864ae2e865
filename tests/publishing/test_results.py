"""The guides give the scores of the model cards."""

import re

import pytest
from huggingface_hub import ModelCard

from support.paths import ROOT


CARDS = sorted(path.parent for path in ROOT.glob("model_cards/*/README.md"))
GUIDES = ("README.md", "model_cards/README.md")


def test_scores():
    scored = {}
    for folder in CARDS:
        results = ModelCard.load(folder / "README.md").data.eval_results or []
        values = [result.metric_value for result in results if "test" in result.dataset_name]
        if values:
            scored[folder.name] = values[0]
    assert scored.keys() >= {"multi30k_en_de", "multi30k_en_fr", "tatoeba_en_de"}
    for guide in GUIDES:
        lines = (ROOT / guide).read_text(encoding="utf-8").splitlines()
        for name, score in scored.items():
            rows = [line for line in lines if line.startswith("|") and f"{name}/README.md" in line]
            assert len(rows) == 1, (guide, name)
            assert re.findall(r"(\d+\.\d+) (?:tokenised|sacre|F1)", rows[0]) == [f"{score:.2f}"], (guide, name)


@pytest.mark.parametrize("name", ["multi30k_en_de", "multi30k_en_fr", "tatoeba_en_de"])
def test_the_guide_of_recipes_has_the_score_of_the_card(name):
    results = ModelCard.load(ROOT / "model_cards" / name / "README.md").data.eval_results
    score = next(result.metric_value for result in results if "test" in result.dataset_name)
    assert f"{score:.2f} " in (ROOT / "training/recipes/README.md").read_text(encoding="utf-8")
