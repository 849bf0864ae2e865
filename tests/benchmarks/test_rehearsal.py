import json

import pytest

from training.benchmarks import rehearsal
from training.trainer.command_line import load_recipe


def test_the_pairs_have_the_lengths_of_wmt14():
    lines = rehearsal.sentence_pairs(2000, seed=0)
    lengths = [[len(side.split()) for side in line.split("\t")] for line in lines]
    assert all(len(sides) == 2 and min(sides) >= 1 for sides in lengths)
    for side in zip(*lengths):
        assert sum(side) / len(side) == pytest.approx(25, abs=1.5)
    assert all(0.5 <= a / b <= 2 for a, b in lengths)


@pytest.mark.parametrize("name", rehearsal.RECIPES)
def test_a_rehearsed_recipe_differs_in_its_data_alone(name, tmp_path):
    recipe, local = load_recipe(name), load_recipe(str(rehearsal.local_recipe(name, tmp_path)))
    assert recipe.keys() - local.keys() == {"dataset_name", "dataset_config", "num_proc"}
    assert local.items() <= recipe.items()
    assert local["source_tokens_per_update"] == local["target_tokens_per_update"] == "25000"


def test_hours_are_operations_divided_by_the_rate_of_eight_devices():
    # The paper's base model: 3.3e18 operations (Table 2) in 12 hours on eight P100 of 9.5 TFLOPS.
    assert rehearsal.hours(3.3e18, tflops=9.5, utilisation=1.0) == pytest.approx(12, rel=0.02)


@pytest.mark.slow
def test_the_base_recipe_runs_with_the_papers_vocabulary_and_budget(capsys):
    rehearsal.main(["--recipes", "wmt14_en_de_base", "--updates", "1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["wmt14_en_de_base"]
    assert figures["vocabulary"] == 37000 and figures["updates_of_the_recipe"] == 100_000
    for side in ("source_tokens", "target_tokens"):
        assert len(figures[side]) == 1 and 20_000 < figures[side][0] <= 25_000
