"""The model card: what it says of a run, its metadata, and what people wrote in it."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import sacrebleu
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard
from sacrebleu.significance import PairedTest
from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from support.models import new_model
from support.paths import ROOT
from support.runs import train_argv
from training.cli import main
from training.data.readers import DataError
from training.evaluation.metrics import Interval, MetricScore
from training.evaluation.report import Report, as_json
from training.inference.loading import load_checkpoint
from training.publish import license_identifier
from training.publishing import model_card
from training.publishing.curves import draw_curves
from training.publishing.deviations import deviations, papers_model
from training.publishing.model_card import merge
from training.publishing.records import Run, find_run, without_paths
from training.publishing.scores import read_report
from training.trainer.arguments import parse_arguments
from training.trainer.cost import cost, operations
from training.trainer.packaged_recipes import packaged_recipes


SEARCH = GenerationConfig(num_beams=4, length_penalty_form="gnmt", length_penalty=0.6, max_extra_tokens=50)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Four updates, of which two checkpoints are averaged."""
    output = tmp_path_factory.mktemp("run")
    more = ["--max_steps", "4", "--average", "last", "--average_count", "2", "--eval_steps", "2"]
    assert main(train_argv(data, output, *more)) == 0
    return output


@pytest.fixture(scope="module")
def card(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    assert write(run, folder, "--example", "The dog sleeps.") == 0
    return folder


def write(run, folder, *more: str) -> int:
    return main(["publish", "--checkpoint", str(run / "average-last"), "--card-only", str(folder), *more])


def section(text: str, name: str) -> str:
    return re.search(rf"<!-- hf-vaswani: {name} -->\n(.*?)<!-- /hf-vaswani: {name} -->", text, re.DOTALL)[1]


def scores(path: Path, score: float = 27.3) -> str:
    """Output of `hf-vaswani score --json`."""
    figures = [
        MetricScore("sacreBLEU", score + 0.001, "nrefs:1|tok:13a|version:2.6.0", Interval(score, 0.9, 1000)),
        MetricScore(
            "perplexity per token", 5.25, "nrefs:1|unit:token|model:/home/me/runs/mine", note="lower is better."
        ),
    ]
    path.write_text(as_json(Report("/home/me/out.de", 1000, 0, figures)), encoding="utf-8")
    return str(path)


# What it says


def test_data_are_named_with_their_fingerprints(card, data):
    found = section((card / "README.md").read_text(), "data")
    for file in map(Path, data["train"]):
        content = file.read_bytes()
        mark = f"`{file.name}`, {len(content):,} bytes, SHA-256 `{hashlib.sha256(content).hexdigest()}`"
        assert f"- Training file: {mark}\n" in found
    assert "- Training pairs: 200 (" in found
    assert "- Vocabulary: 300 entries, BPE" in found


def test_the_recipe_in_the_card_gives_the_run_again(card, data, run, tmp_path):
    found = section((card / "README.md").read_text(), "training")
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", found, re.DOTALL)[1])
    assert recipe["train_files"] == [Path(name).name for name in data["train"]]
    recipe["train_files"], recipe["eval_files"] = data["train"], data["val"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = ["--max_steps", "4", "--average", "last", "--average_count", "2", "--eval_steps", "2"]
    told = train_argv(data, run, *options)[1:]
    again = parse_arguments(
        ["--config", str(tmp_path / "recipe.yaml"), "--output_dir", str(run), "--disable_tqdm", "1"]
    )
    for one, other in zip(again, parse_arguments(told)):
        first, second = asdict(one), asdict(other)
        first.pop("model_overrides", None), second.pop("model_overrides", None)  # d_k and d_v are named
        assert first == second
    assert again[0].model_overrides.items() >= {"d_model": 16, "d_ff": 16, "num_heads": 2, "decoder_layers": 1}.items()


def test_what_was_averaged_and_how_long_it_took(card, run):
    text = (card / "README.md").read_text()
    assert "the mean of 2 checkpoints: `checkpoint-2`, `checkpoint-4`." in section(text, "summary")
    runtime = json.loads((run / "trainer_state.json").read_text())["log_history"][-1]["train_runtime"]
    assert f"- Time: {runtime / 60:.1f} minutes, evaluation included\n" in section(text, "training")
    assert "- Updates: 4\n" in section(text, "training")
    assert re.search(r"^- Energy: neither measured nor estimated: .*power", section(text, "training"), re.M)
    assert re.search(r"^- Source tokens seen: [\d,]+, padding included", section(text, "training"), re.M)
    assert re.search(r"^- Target tokens seen: about [\d,]+ \(estimate", section(text, "training"), re.M)
    assert re.search(r"^- Floating point operations: about \d\.\de\+\d\d \(estimate", section(text, "training"), re.M)


def test_power_makes_an_estimate_of_the_energy(run, tmp_path):
    assert write(run, tmp_path, "--watts", "1000", "--hardware", "a toaster") == 0
    found = section((tmp_path / "README.md").read_text(), "training")
    seconds = json.loads((run / "trainer_state.json").read_text())["log_history"][-1]["train_runtime"]
    assert f"- Energy: about {seconds / 3600:.2g} kWh (estimate: 1000 W" in found
    assert "- Hardware: a toaster\n" in found


def test_the_example_is_what_the_model_answers(card, run, tmp_path):
    (tmp_path / "source").write_text("The dog sleeps.\n")
    words = ["--model", str(run / "average-last"), "--input", str(tmp_path / "source")]
    assert main(["translate", *words, "--output", str(tmp_path / "target")]) == 0
    answer = (tmp_path / "target").read_text().strip()
    escaped = re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", answer) or "(nothing)"
    assert f"> The dog sleeps.\n>\n> {escaped}\n" in section((card / "README.md").read_text(), "usage")


def test_scores_are_those_of_sacrebleu(run, data, tmp_path):
    source, target = data["test"]
    assert write(run, tmp_path, "--test-sources", source, "--test-references", target) == 0
    output = str(tmp_path / "out")
    assert main(["translate", "--model", str(run / "average-last"), "--input", source, "--output", output]) == 0
    lines = [Path(name).read_text().splitlines() for name in (output, target)]
    expected = {
        "sacreBLEU": sacrebleu.corpus_bleu(lines[0], [lines[1]]).score,
        "chrF": sacrebleu.corpus_chrf(lines[0], [lines[1]]).score,
        "TER": sacrebleu.corpus_ter(lines[0], [lines[1]]).score,
    }
    results = {r.metric_name: r for r in ModelCard.load(tmp_path / "README.md").data.eval_results}
    found = section((tmp_path / "README.md").read_text(), "scores")
    for name, score in expected.items():
        assert results[name].metric_value == round(score, 2)
        assert f"| {name} | {score:.2f} |" in found
    assert f"`hf-vaswani score --model user/average-last --sources {Path(source).name} " in found
    first = Path(source).read_text().splitlines()[0]
    assert f"translator({json.dumps(first)})" in (tmp_path / "README.md").read_text()


def test_scores_of_tokenised_text_are_called_so(run, data, tmp_path):
    source, target = data["test"]
    assert write(run, tmp_path, "--test-sources", source, "--test-references", target, "--tokenized") == 0
    found = section((tmp_path / "README.md").read_text(), "scores")
    assert re.search(r"^\| tokenised BLEU \| .*tok:none", found, re.M) and "sacreBLEU |" not in found
    assert f"--references {Path(target).name} --tokenized --metrics " in found


def copy_of(run: Path, folder: Path, **noted) -> Path:
    """A run whose record notes other things."""
    shutil.copytree(run, folder)
    averaged = folder / "average-last" / "averaged_from.json"
    averaged.write_text(averaged.read_text().replace(str(run), str(folder)))
    for path in folder.rglob("run.json"):
        record = json.loads(path.read_text())
        record["may_change"] |= noted
        path.write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        (
            {"hardware": {"device": "cpu", "name": "A* 9000", "cores": 2}},
            r"1 process on the CPU: A\* 9000 (cores available: 2)",
        ),
        ({"hardware": {"device": "cuda", "name": "NVIDIA H200", "cores": 9}}, "1 accelerator: NVIDIA H200"),
        (
            {"hardware": {"device": "cuda", "name": "NVIDIA H200", "cores": 9}, "devices": 8},
            "8 accelerators; the first: NVIDIA H200",
        ),
        ({"hardware": None, "use_cpu": True}, "1 process on the CPU; model not recorded"),
    ],
)
def test_hardware_is_what_the_run_recorded(run, tmp_path, noted, told):
    copy = copy_of(run, tmp_path / "run", **noted)
    assert write(copy, tmp_path / "card") == 0
    assert f"- Hardware: {told}\n" in section((tmp_path / "card" / "README.md").read_text(), "training")


@pytest.mark.parametrize("changed", [False, True])
def test_without_a_sentence_the_first_of_the_evaluation_data_is_translated(run, data, tmp_path, changed):
    """If its files are still what they were."""
    files = [str(shutil.copy(file, tmp_path)) for file in data["val"]]
    copy = copy_of(run, tmp_path / "run", **{"places of eval_files": files})
    first = Path(files[0]).read_text().splitlines()[0]
    if changed:
        Path(files[0]).write_text(Path(files[0]).read_text().replace(".", "!"))
    assert write(copy, tmp_path / "card") == 0
    usage = section((tmp_path / "card" / "README.md").read_text(), "usage")
    assert (f"translator({json.dumps(first)})" in usage) is not changed
    assert ("\n> " in usage) is not changed
    assert str(tmp_path) not in usage


def test_the_run_records_where_its_evaluation_data_lie(run, data):
    record = json.loads((run / "checkpoint-4" / "run.json").read_text())
    assert record["may_change"]["places of eval_files"] == [str(Path(file).absolute()) for file in data["val"]]


@pytest.mark.parametrize("options", [[], ["--tokenized"]])
def test_the_command_in_the_card_gives_the_scores_in_the_card(
    run,
    data,
    tmp_path,
    capsys,
    monkeypatch,
    options,
):
    """The paper's count and the tests against another system among them."""
    monkeypatch.setattr(PairedTest, "_DEFAULT_SAMPLES", {"ar": 60, "bs": 60})
    monkeypatch.chdir(tmp_path)
    for file in data["test"]:
        shutil.copy(file, tmp_path)
    sources, references = (Path(file).name for file in data["test"])
    lines = Path(references).read_text().splitlines()
    (tmp_path / "an other").write_text("".join(f"{line[::-1]}\n" for line in lines))
    made = [line.partition(" ")[2] for line in lines]  # so little trained, the model itself says nothing
    for module in ("publishing.hub", "evaluation.scoring"):
        monkeypatch.setattr(f"training.{module}.translate", lambda *_: made)
    more = ["--test-sources", str(tmp_path / sources), "--test-references", references, *options]
    more += ["--repo", "alice/round", "--baseline", str(tmp_path / "an other")]
    assert write(run, tmp_path / "card", *more) == 0
    text = (tmp_path / "card" / "README.md").read_text()
    found = section(text, "scores")
    command = shlex.split(re.search(r"^Computed by `hf-vaswani (.*)`\.$", found, re.M)[1])
    assert command[:3] == ["score", "--model", "alice/round"]
    folder = str(run / "average-last")
    monkeypatch.setattr(
        "training.evaluation.scoring.load_checkpoint", lambda name, dtype, **kwargs: load_checkpoint(folder, dtype)
    )
    capsys.readouterr()
    small = ["--paired-bootstrap", "60", "--paired-randomization", "60"]
    assert main([*command, *small, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first = "tokenised BLEU" if options else "sacreBLEU"
    names = [first, "chrF", "chrF++", "TER", "compound-split BLEU", "perplexity per token", "perplexity per word"]
    assert [figure["name"] for figure in report["figures"]] == names
    assert all(figure["score"] > 1 and figure["interval"] for figure in report["figures"])
    results = ModelCard(text).data.eval_results
    assert [(r.metric_name, r.metric_value, r.metric_args["signature"]) for r in results] == [
        (figure["name"], round(figure["score"], 2), figure["signature"]) for figure in report["figures"]
    ]
    assert results[-1].metric_args["signature"].endswith("|model:alice/round")
    assert "compound-split BLEU: the paper's metric" in found and "not comparable with sacreBLEU" in found
    table = found.partition("#### Against baselines")[2]
    assert [each["metric"] for each in report["comparisons"]] == names[:5]
    for each in report["comparisons"]:
        difference, p = each["score"] - each["baseline_score"], each["p_values"]
        cells = [each["metric"], f"{each['baseline_score']:.2f}", f"{difference:+.2f}"]
        assert f"| an other | {' | '.join(cells)} | {p['bootstrap']:.4f} | {p['randomization']:.4f} |" in table
        assert f"{each['metric']}, bootstrap: {each['signatures']['bootstrap']}".replace("|", "\\|") in table
    assert str(tmp_path) not in text


def test_a_language_that_the_papers_count_does_not_know_has_none(run, data, tmp_path):
    sources, references = data["test"]
    more = ["--languages", "en", "fr", "--test-sources", sources, "--test-references", references]
    assert write(run, tmp_path, *more) == 0
    found = section((tmp_path / "README.md").read_text(), "scores")
    assert "| sacreBLEU |" in found and "compound" not in found


def test_no_path_of_the_machine_is_in_what_is_written(card, run, tmp_path):
    assert write(run, tmp_path, "--scores", scores(tmp_path / "newstest2014.json")) == 0
    for text in ((card / "README.md").read_text(), (tmp_path / "README.md").read_text()):
        assert str(run) not in text and str(tmp_path) not in text and "/home/me" not in text
    assert (card / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "](curves.png)" in section((card / "README.md").read_text(), "training")


def test_without_matplotlib_there_is_a_notice_and_no_picture(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(model_card, "draw_curves", draw_curves)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write(run, tmp_path) == 0
    assert "picture of the curves" in caplog.text and "hf-vaswani[plots]" in caplog.text
    assert not (tmp_path / "curves.png").exists()
    assert "curves.png" not in (tmp_path / "README.md").read_text()


def test_what_was_not_recorded_is_said_not_to_be(run, tmp_path):
    """Weights in a folder of their own, with no record beside them."""
    (tmp_path / "plain").mkdir()
    for path in (run / "average-last").iterdir():
        if path.name != "averaged_from.json":
            (tmp_path / "plain" / path.name).write_bytes(path.read_bytes())
    command = ["publish", "--checkpoint", str(tmp_path / "plain"), "--card-only"]
    assert main([*command, str(tmp_path / "card")]) == 0
    text = (tmp_path / "card" / "README.md").read_text()
    assert "not recorded (the run has no `run.json`)" in section(text, "data")
    assert re.search(r"not recorded \(no `trainer_state\.json`", section(text, "training"))
    assert "The run's arguments were not recorded." in section(text, "training")
    assert "configuration and search settings only" in section(text, "deviations")
    assert "language" not in ModelCard(text).data.to_dict()

    assert main([*command, str(tmp_path / "named"), "--recipe", "multi30k_en_de"]) == 0
    text = (tmp_path / "named" / "README.md").read_text()
    assert re.search(r"according to the publisher.*did not record its arguments", section(text, "training"))
    assert "$MULTI30K/lc_norm_tok/train.en.gz" in section(text, "data")
    assert "| warmup\\_steps | 2,000 | 4,000 | 5.3 |" in section(text, "deviations")
    assert ModelCard(text).data.language == ["en", "de"]


# What follows from the log


def test_tokens_and_time_follow_from_rates_and_the_last_start():
    """Updates of 100 target tokens: 10 at 100 tokens/s, then, after a new start, 10 at 50 tokens/s; a minute of
    evaluation in each."""
    log = [
        {"step": 10, "loss": 1.0, "target_tokens_per_second": 100.0},
        {"step": 10, "eval_loss": 1.0, "eval_runtime": 60.0},
        {"step": 20, "loss": 1.0, "target_tokens_per_second": 50.0},
        {"step": 20, "eval_loss": 1.0, "eval_runtime": 60.0},
        {"step": 20, "train_runtime": 80.0, "train_steps_per_second": 0.125},
    ]
    state = {"global_step": 20, "epoch": 2.0, "log_history": log, "total_flos": 6 * 1000 * 2200.0}
    found = cost(state, parameters_without_embeddings=1000, devices=1)
    assert (found.updates, found.epochs, found.source_tokens) == (20, 2.0, 2200)
    assert (found.measured_seconds, found.measured_updates) == (80.0, 10)
    assert found.target_tokens == 2000
    assert found.seconds == pytest.approx(10 + 60 + 20 + 60)
    assert cost(state, 1000, devices=4).target_tokens == 8000
    cut = cost({**state, "log_history": log[:-1]}, 1000, devices=1)
    assert (cut.target_tokens, cut.seconds, cut.source_tokens) == (None, None, 2200)


def test_operations_are_6_for_each_weight_that_a_token_passes():
    """The base model's: attention 4 x 512 x 512, feed-forward 2 x 512 x 2048 with biases, and layer norms."""
    attention, feed_forward, norm = 4 * 512 * 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder = 6 * (attention + feed_forward + 2 * norm)
    decoder = 6 * (2 * attention + feed_forward + 3 * norm)
    assert encoder + decoder == 44_101_632
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(VaswaniConfig.from_table3("base", vocab_size=1000))
    assert operations(model, 10, 20) == 6 * (10 * encoder + 20 * (decoder + 1000 * 512))


# The paper


def recorded(checkpoints: int, steps: int, **more) -> Run:
    """A run with the defaults, which are the paper's."""
    same = {"source_lang": "en", "target_lang": "de", "dataset_name": "wmt/wmt14", "warmup_steps": 4000, **more}
    averaged = {"method": "mean of the weights", "checkpoints": [f"checkpoint-{i}" for i in range(checkpoints)]}
    return Run({"global_step": steps}, {"must_match": same, "may_change": {}}, averaged)


@pytest.mark.parametrize(
    ("row", "overrides", "run"),
    [
        ("base", {"vocab_size": 37000}, recorded(5, 100_000, learning_rate=512**-0.5 * 4000**-0.5)),
        ("big", {"vocab_size": 37000}, recorded(20, 300_000)),
        ("big", {"vocab_size": 32000, "dropout": 0.1}, recorded(20, 300_000, target_lang="fr")),
    ],
)
def test_the_papers_own_models_do_not_differ_from_it(row, overrides, run):
    config = VaswaniConfig.from_table3(row, **overrides)
    assert deviations(run, config, SEARCH, papers_model(run, config)) == []


def test_what_differs_from_the_paper_is_listed_with_the_section():
    config = VaswaniConfig.from_table3("base", vocab_size=37000, d_ff=1024, dropout=0.2)
    search = GenerationConfig(num_beams=5, length_penalty_form="gnmt", length_penalty=0.6, max_extra_tokens=50)
    run = recorded(3, 5000, adam_beta2=0.999, learning_rate=0.005, dataset_name="mine")
    assert deviations(run, config, search, papers_model(run, config)) == [
        ("d_ff", "1,024", "2,048", "Table 3, base"),
        ("dropout", "0.2", "0.1", "Table 3, base"),
        ("training data", "see above", "WMT14", "5.1"),
        ("adam_beta2", "0.999", "0.98", "5.3"),
        ("learning_rate (peak, by warmup_steps and d_model)", "0.005", "0.0006988", "5.3"),
        ("updates", "5,000", "100,000", "5.2"),
        ("averaged checkpoints", "the last 3", "the last 5", "6.1"),
        ("num_beams", "5", "4", "6.1"),
    ]


# Metadata


def test_metadata_are_the_hubs(run, tmp_path):
    given = ["--repo", "me/my-model", "--license", "cc-by-4.0", "--datasets", "wmt/wmt14"]
    assert write(run, tmp_path, *given, "--scores", scores(tmp_path / "newstest2014.json")) == 0
    found = ModelCard.load(tmp_path / "README.md").data
    assert found.eval_results == [
        EvalResult(
            task_type="translation",
            task_name="Translation",
            dataset_type="newstest2014",
            dataset_name="newstest2014",
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            metric_args={"signature": signature},
        )
        for kind, name, value, signature in [
            ("sacrebleu", "sacreBLEU", 27.3, "nrefs:1|tok:13a|version:2.6.0"),
            ("perplexity", "perplexity per token", 5.25, "nrefs:1|unit:token|model:mine"),
        ]
    ]
    rest = found.to_dict()
    rest.pop("model-index")
    assert rest == {
        "language": ["en", "de"],
        "license": "cc-by-4.0",
        "datasets": ["wmt/wmt14"],
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "metrics": ["perplexity", "sacrebleu"],
        "tags": ["vaswani", "attention-is-all-you-need"],
    }
    assert "27.30 ± 0.90" in section((tmp_path / "README.md").read_text(), "scores")


def test_an_unnamed_licence_is_unknown(card):
    assert ModelCard.load(card / "README.md").data.license == "unknown"
    assert "Not stated" in section((card / "README.md").read_text(), "licence")


# What people wrote


def test_written_twice_it_is_the_same_to_the_byte(run, tmp_path):
    more = ["--example", "The dog sleeps.", "--scores", scores(tmp_path / "a.json")]
    assert write(run, tmp_path, *more) == 0
    before = (tmp_path / "README.md").read_bytes(), (tmp_path / "curves.png").read_bytes()
    assert write(run, tmp_path, *more) == 0
    assert ((tmp_path / "README.md").read_bytes(), (tmp_path / "curves.png").read_bytes()) == before


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_people_wrote_survives_a_new_score(run, tmp_path, newline):
    assert write(run, tmp_path, "--license", "mit", "--scores", scores(tmp_path / "a.json", 20.0)) == 0
    path = tmp_path / "README.md"
    text = path.read_text()
    text = text.replace("\n# average-last\n", "\n# My model\n").replace(
        "## Scores\n", "## How good it is\n\nNot very.\n"
    )
    text = text.replace("tags:\n", "thumbnail: mine.png  # by me\ntags:\n- german\n")
    text = re.sub(r"<!-- hf-vaswani: data -->.*<!-- /hf-vaswani: data -->", "My own data.", text, flags=re.DOTALL)
    path.write_bytes((text + "\n## Thanks\n\nTo all.\n").replace("\n", newline).encode())
    assert write(run, tmp_path, "--scores", scores(tmp_path / "a.json", 30.0)) == 0
    renewed = path.read_bytes().decode()
    assert renewed.count("\r") == (renewed.count("\n") if newline == "\r\n" else 0)
    renewed = renewed.replace("\r\n", "\n")
    for mine in ("\n# My model\n", "## How good it is\n\nNot very.\n", "\n## Thanks\n\nTo all.\n", "My own data."):
        assert mine in renewed
    assert "hf-vaswani: data" not in renewed
    assert "| 30.00 |" in section(renewed, "scores") and "20.00" not in renewed
    found = ModelCard.load(path).data
    assert [r.metric_value for r in found.eval_results] == [30.0, 5.25]
    assert (found.license, found.thumbnail, found.tags[0]) == ("mit", "mine.png", "german")
    assert "Weights: mit." in section(renewed, "licence")


def test_scores_stay_with_their_weights_alone(run, tmp_path):
    assert write(run, tmp_path, "--scores", scores(tmp_path / "a.json")) == 0
    path = tmp_path / "README.md"
    text = path.read_text().replace("tags:", "tags:  # mine")
    path.write_text(text)
    assert write(run, tmp_path) == 0
    assert path.read_text() == text
    other = re.sub(r"SHA-256 `\w+`\)\.", "SHA-256 `0123`).", text)
    assert other != text
    path.write_text(other)
    assert write(run, tmp_path) == 0
    assert "Not scored yet" in section(path.read_text(), "scores")
    assert not {"model-index", "metrics"} & ModelCard.load(path).data.to_dict().keys()


@pytest.mark.parametrize("newline", ["\n", pytest.param("\r\n", marks=pytest.mark.slow)])
def test_scores_of_other_test_sets_stay_with_their_weights(run, tmp_path, newline):
    path = tmp_path / "README.md"

    def values() -> list[tuple[str, float]]:
        return [(r.dataset_name, r.metric_value) for r in ModelCard.load(path).data.eval_results]

    def tables() -> list[str]:
        return re.findall(r"^### (\w+)$|^\| sacreBLEU \| (\d+)", section(path.read_text(), "scores"), re.M)

    assert write(run, tmp_path, "--scores", scores(tmp_path / "first.json", 20.0)) == 0
    path.write_bytes(path.read_bytes().replace(b"\n", newline.encode()))
    assert write(run, tmp_path, "--scores", scores(tmp_path / "second.json", 30.0)) == 0
    assert values() == [("first", 20.0), ("first", 5.25), ("second", 30.0), ("second", 5.25)]
    assert tables() == [("first", ""), ("", "20"), ("second", ""), ("", "30")]
    assert write(run, tmp_path, "--scores", scores(tmp_path / "first.json", 25.0)) == 0
    assert values() == [("first", 25.0), ("first", 5.25), ("second", 30.0), ("second", 5.25)]
    assert tables() == [("first", ""), ("", "25"), ("second", ""), ("", "30")]
    before = path.read_bytes()
    assert before.count(b"\r") == (before.count(b"\n") if newline == "\r\n" else 0)
    for name, score in (("first", 25.0), ("second", 30.0)):  # in any order, what is there already changes nothing
        assert write(run, tmp_path, "--scores", scores(tmp_path / f"{name}.json", score)) == 0
        assert path.read_bytes() == before
    path.write_bytes(re.sub(rb"SHA-256 `\w+`\)\.", b"SHA-256 `0123`).", before))  # of other weights
    assert write(run, tmp_path, "--scores", scores(tmp_path / "third.json", 40.0)) == 0
    assert values() == [("third", 40.0), ("third", 5.25)]
    assert tables() == [("third", ""), ("", "40")]


def test_a_card_without_generated_sections_is_left_alone_with_a_notice(run, tmp_path, caplog):
    mine = {"README.md": b"# Mine\r\n\n![All of it](curves.png)", "curves.png": b"my own"}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    assert write(run, tmp_path, "--license", "mit") == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == mine
    assert "has no generated sections" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (("<!-- /hf-vaswani: scores -->", ""), "The card's section 'scores' should have one comment"),
        (("<!-- hf-vaswani: usage -->", ""), "The card's section 'usage' should have one comment"),
        (("<!-- hf-vaswani: usage -->", "<!-- hf-vaswani: usage -->" * 2), "'usage'"),
        (("license: unknown", "license: [unknown"), "The metadata at the top of the card cannot be read"),
    ],
)
def test_a_card_that_cannot_be_renewed_is_an_error_and_stays(card, run, tmp_path, capsys, damage, message):
    text = (card / "README.md").read_text()
    assert text.count(damage[0]) == 1
    (tmp_path / "README.md").write_text(text.replace(*damage))
    assert write(run, tmp_path) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text.replace(*damage)


def test_nothing_given_replaces_no_metadata(card):
    text = (card / "README.md").read_text()
    new = ModelCard(text.replace("license: unknown", "license: mit"))
    assert ModelCard(merge(text, new, "no weights", set())).data.license == "unknown"
    assert ModelCard(merge(text, new, "no weights", {"license"})).data.license == "mit"


def test_a_card_that_cannot_be_written_to_its_end_leaves_the_earlier_one(card, run, tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_bytes((card / "README.md").read_bytes() + b"## Thanks\n")
    before, full = path.read_bytes(), []

    def sync(file):
        full.append(file)
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", sync)
    assert write(run, tmp_path, "--license", "mit") == 1
    assert full and {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"README.md": before}


def test_a_link_where_a_card_would_grow_is_not_followed(run, tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in ("README.md", "curves.png"):
        (tmp_path / f"{name}.partial").symlink_to("precious")
    assert write(run, tmp_path) == 0
    assert (tmp_path / "README.md").read_text().startswith("---\n")
    assert (tmp_path / "precious").read_text() == "precious"


# What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "nowhere"], "--run nowhere: no such folder."),
        (["--recipe", "none_such"], "no recipe of that name"),
        (["--scores", "nowhere.json"], "nowhere.json: no such file."),
    ],
)
def test_what_is_not_there_is_named(run, tmp_path, capsys, options, message):
    assert write(run, tmp_path, *options) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_a_run_of_another_model_is_refused_or_passed_over(run, tmp_path, capsys, tokenizer, caplog):

    folder = run / "stranger"
    new_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = ["publish", "--checkpoint", str(folder), "--card-only", str(tmp_path)]
    assert main([*command, "--run", str(run)]) == 1
    assert "another model was trained there, with vocab_size 300 instead of" in capsys.readouterr().err
    assert main(command) == 0
    assert "its records are not used" in caplog.text
    assert "not recorded" in section((tmp_path / "README.md").read_text(), "data")


REPORT = {"system": "out", "sentences": 3, "empty": 0, "comparisons": []}
FIGURE = {"name": "sacreBLEU", "score": 27.3, "signature": "tok:13a", "interval": None, "details": {}, "note": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"score": 27.3}', "comparisons"),
        (
            json.dumps({**REPORT, "figures": [{**FIGURE, "score": math.nan}]}),
            "score: expected a finite number, found nan",
        ),
        (
            json.dumps({**REPORT, "figures": [{**FIGURE, "score": -math.inf}]}),
            "score: expected a finite number, found -inf",
        ),
        (
            json.dumps({**REPORT, "figures": [FIGURE]}).replace("27.3", "1e999"),
            "figures: 0: score: expected a finite number",
        ),
        (json.dumps({**REPORT, "figures": [FIGURE]}).replace("27.3", "1" * 5000), "digits"),
        (json.dumps({**REPORT, "figures": [{**FIGURE, "digits": 2, "score": "27.3"}]}), "str"),
        (
            json.dumps({**REPORT, "figures": [{**FIGURE, "digits": 10**9}]}),
            "digits: expected 0 to 20",
        ),
        (
            json.dumps({**REPORT, "figures": [{**FIGURE, "digits": 2, "details": {"precisions": 3}}]}),
            "details: no field",
        ),
        (json.dumps({**REPORT, "figures": [{**FIGURE, "digits": 2, "color": "red"}]}), "color"),
        (json.dumps({**REPORT, "figures": {"a": 1}}), "'figures' expected a list, got dict"),
        ("[" * 100_000, "recursion"),
        ("", "Expecting value"),
    ],
)
def test_scores_must_be_a_report(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a\.json: expected the output of `hf-vaswani score --json`") as caught:
        read_report(str(tmp_path / "a.json"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_infinite_score_alone_replaces_an_older_one(run, tmp_path):
    """Though the metadata cannot hold it; of another test set, the older one stays."""
    for name in ("a", "b"):
        assert write(run, tmp_path, "--scores", scores(tmp_path / f"{name}.json")) == 0
    figures = [MetricScore("perplexity per word", math.inf, "unit:word")]
    (tmp_path / "b.json").write_text(as_json(Report("out", 3, 0, figures)))
    assert write(run, tmp_path, "--scores", str(tmp_path / "b.json")) == 0
    text = (tmp_path / "README.md").read_text()
    assert section(text, "scores").count("| sacreBLEU |") == 1 and "| inf |" in section(text, "scores")
    assert {r.dataset_name for r in ModelCard(text).data.eval_results} == {"a"}


def recorded_with(**values) -> str:
    known = {"source_lang": "en", "target_lang": "de", "max_steps": 4, "learning_rate": 1e-3}
    return json.dumps({"must_match": known | values, "may_change": {"devices": 1}})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("averaged_from.json", '{"method": "x", "checkpoints": [1]}', "'checkpoints'"),
        ("averaged_from.json", "[]", "expected a JSON object, found []"),
        ("trainer_state.json", '{"global_step": "4", "log_history": []}', "'global_step'"),
        ("trainer_state.json", '{"global_step": 4}', "no field 'epoch'"),
        ("trainer_state.json", '{"global_step": 4', "not a JSON object"),
        ("run.json", '{"must_match": {}}', "'may_change'"),
        ("run.json", '{"must_match": {}, "may_change": {}}', "no field 'devices'"),
        ("run.json", recorded_with(train_files="a.en"), "'train_files'"),
        ("run.json", recorded_with(pairs="many"), "'pairs'"),
        ("run.json", recorded_with(learning_rate=math.nan), "'learning_rate'"),
        ("run.json", recorded_with(**{"train_files[0]": {"size": "3", "sha256": "0"}}), "'size'"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: ") as caught:
        find_run(tmp_path, VaswaniConfig())
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["a b", 'me/x", evil="', "../me", "me/a/b", "me/\n", "-->"])
def test_a_repository_must_have_a_name_of_the_hub(name, capsys):
    with pytest.raises(SystemExit):
        main(["publish", "--checkpoint", "nowhere", "--card-only", f"--repo={name}"])
    assert "Hub repository, user/name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "missing"), [([], "--repo"), (["--card-only", "--test-sources", "a"], "--test-references")]
)
def test_options_that_do_not_go_together_are_told(options, missing, capsys):
    with pytest.raises(SystemExit):
        main(["publish", "--checkpoint", "nowhere", *options])
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize("name", ["CC BY 4.0", "Apache_2", "cc-by-4.0\n", ""])
def test_a_licence_must_have_the_form_of_the_hubs(name, capsys):
    with pytest.raises(SystemExit):
        main(["publish", "--checkpoint", "nowhere", "--card-only", "--license", name])
    error = capsys.readouterr().err
    assert "--license" in error and "cc-by-4.0" in error and f"got {name!r}" in error


@pytest.mark.parametrize("name", ["mit", "cc-by-nc-sa-4.0", "bsd-3-clause-clear", "c-uda", "openrail++", "other"])
def test_the_hubs_own_licences_are_taken(name):
    assert license_identifier(name) == name


def test_a_score_that_is_not_finite_is_in_the_table_alone(run, tmp_path):
    figures = [MetricScore("chrF", 50.0, "v:1"), MetricScore("perplexity per word", math.inf, "unit:word")]
    (tmp_path / "a.json").write_text(as_json(Report("out", 3, 0, figures)))
    assert write(run, tmp_path, "--scores", str(tmp_path / "a.json")) == 0
    assert "| perplexity per word | inf |" in section((tmp_path / "README.md").read_text(), "scores")
    assert [r.metric_name for r in ModelCard.load(tmp_path / "README.md").data.eval_results] == ["chrF"]


def test_paths_are_cut_down_to_names():
    record = {"output_dir": "/home/me/run", "files": ["C:\\data\\a.en", "$DATA/b.en", "runs/c"], "n": 1, "none": None}
    assert without_paths(record) == {
        "output_dir": "run",
        "files": ["a.en", "$DATA/b.en", "runs/c"],
        "n": 1,
        "none": None,
    }


# The cards of this repository


CARDS = sorted((ROOT / "model_cards").glob("*/README.md"))
TARGETS = {  # newstest2014, Table 2
    "wmt14_en_de_base": "27.3",
    "wmt14_en_de_big": "28.4",
    "wmt14_en_fr_base": "38.1",
    "wmt14_en_fr_big": "41.8",
}


def test_each_recipe_but_the_demo_has_a_card():
    names = {path.parent.name for path in CARDS}
    assert names >= TARGETS.keys() and names <= set(packaged_recipes())


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_a_card_of_this_repository_can_be_renewed_and_names_no_machine(path):
    text, name = path.read_text(), path.parent.name
    assert not re.search(r"/(root|home|work|tmp)/", text)
    card = ModelCard(text)
    is_parser = name.startswith("parsing_")
    assert (card.data.pipeline_tag, card.data.library_name) == (None if is_parser else "translation", "transformers")
    assert card.data.language == ["en"] + ([] if is_parser else [re.search(r"en_(\w\w)", name)[1]])
    assert "not trained here" in merge(text, card, "none", set()).lower() or card.data.eval_results
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (path.parent / picture).is_file()
    if name in TARGETS:
        assert "**Not trained here.**" in section(text, "summary")
        assert f"**{TARGETS[name]} BLEU**" in text
        assert card.data.eval_results is None
        fields = {"row": name.rpartition("_")[2], "vocab_size": 37000 if "_de_" in name else 32000}
        with torch.device("meta"):
            model = VaswaniForConditionalGeneration(VaswaniConfig.from_table3(**fields))
        assert f"{model.num_parameters():,} parameters" in text


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_the_scoring_commands_of_a_card_of_this_repository_can_be_run(path, monkeypatch):
    """Up to where they read files: the options go together, and the metrics know the language."""
    text = path.read_text()
    commands = re.findall(r"^ *(hf-vaswani score (?:.*\\\n)*.*)", text, re.M)
    commands += re.findall(r"`(hf-vaswani score --model [^`]+)`", text)
    assert commands
    for command in commands:
        seen = []
        monkeypatch.setattr(
            "training.evaluation.scoring._read", lambda args, seen=seen: seen.append(args) or sys.exit(0)
        )
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(command.partition(" > ")[0].replace("\\\n", " "))[1:])
        assert stop.value.code == 0 and len(seen) == 1
