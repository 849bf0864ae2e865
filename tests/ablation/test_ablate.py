import json
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from filelock import FileLock
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani import TABLE_3, VaswaniConfig
from training.ablation.experiment import Ablation, evaluate
from training.ablation.rows import base_config, named_rows, row_config
from training.ablation.table import summary, to_markdown, verdict
from training.cli import main
from training.demo_data import write_demo_data
from training.inference.translation import translate
from training.paper import PAPER
from training.trainer.arguments import ModelArguments, parse_arguments
from training.trainer.manifest import model_fields
from training.trainer.trainer import VaswaniTrainer


SMALL = {"d_model": 128, "d_ff": 512, "encoder_layers": 3, "decoder_layers": 3}  # eight heads, as base


# The rows


@pytest.mark.parametrize("row", TABLE_3)
def test_with_the_papers_base_the_rows_are_table_3(row):
    assert model_fields(row_config(VaswaniConfig(), row)) == model_fields(VaswaniConfig.from_table3(row))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("A-h1", {"num_heads": 1, "d_k": 128, "d_v": 128}),
        ("A-h4", {"num_heads": 4, "d_k": 32, "d_v": 32}),
        ("A-h16", {"num_heads": 16, "d_k": 8, "d_v": 8}),
        ("A-h32", {"num_heads": 32, "d_k": 4, "d_v": 4}),
        ("B-dk16", {"d_k": 4}),
        ("B-dk32", {"d_k": 8}),
        ("C-N2", {"encoder_layers": 1, "decoder_layers": 1}),
        ("C-N4", {"encoder_layers": 2, "decoder_layers": 2}),
        ("C-N8", {"encoder_layers": 4, "decoder_layers": 4}),
        ("C-d256", {"d_model": 64, "d_k": 8, "d_v": 8}),
        ("C-d1024", {"d_model": 256, "d_k": 32, "d_v": 32}),
        ("C-ff1024", {"d_ff": 256}),
        ("C-ff4096", {"d_ff": 1024}),
        ("D-drop0.0", {"dropout": 0.0}),
        ("D-drop0.2", {"dropout": 0.2}),
        ("D-ls0.0", {"label_smoothing": 0.0}),
        ("D-ls0.2", {"label_smoothing": 0.2}),
        ("E-learned", {"position_embedding": "learned"}),
        ("big", {"d_model": 256, "d_ff": 1024, "num_heads": 16, "dropout": 0.3}),
    ],
)
def test_a_row_changes_a_small_base_as_the_papers_row_changes_base(row, expected):
    base = model_fields(VaswaniConfig(**SMALL))
    fields = model_fields(row_config(VaswaniConfig(**SMALL), row))
    assert {name: value for name, value in fields.items() if value != base[name]} == expected


def test_what_the_recipe_overrides_beside_stays_in_every_row():
    base = VaswaniConfig(**SMALL, attention_bias=True, attention_dropout=0.1, dropout=0.3)
    config = row_config(base, "C-ff1024")
    assert (config.attention_bias, config.attention_dropout, config.dropout, config.d_ff) == (True, 0.1, 0.3, 256)
    assert row_config(base, "D-drop0.0").dropout == 0.0


def test_the_scale_is_that_of_the_widths():
    config = base_config(ModelArguments(model_overrides={"dropout": 0.2}), Fraction("0.25"))
    assert (config.d_model, config.d_ff, config.d_k, config.d_v) == (128, 512, 16, 16)
    assert (config.num_heads, config.encoder_layers, config.decoder_layers, config.dropout) == (8, 6, 6, 0.2)


@pytest.mark.parametrize(
    ("overrides", "row", "message"),
    [
        ({"num_heads": 4}, "A-h1", r"Row A-h1: num_heads would be 4 x 1/8 = 1/2, which is not an integer"),
        ({"decoder_layers": 2}, "C-N2", r"Row C-N2: decoder_layers would be 2 x 1/3 = 2/3"),
        ({"dropout": 0.2}, "D-drop0.2", r"Row D-drop0.2 would not differ from base, which already has dropout 0.2"),
        ({"d_model": 34, "num_heads": 2}, "C-d256", r"Row C-d256: .*17"),
    ],
)
def test_a_row_that_cannot_be_is_named(overrides, row, message):
    with pytest.raises(ValueError, match=message):
        row_config(VaswaniConfig(**{**SMALL, **overrides}), row)


def test_a_base_that_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"Row base: d_model would be 512 x 1/1024 = 1/2"):
        base_config(ModelArguments(), Fraction(1, 1024))
    with pytest.raises(ValueError, match=r"model=big: .*expected model=base"):
        base_config(ModelArguments(model="big"))
    with pytest.raises(ValueError, match=r"model_overrides .*'d_modle'"):
        base_config(ModelArguments(model_overrides={"d_modle": 3}))


def test_rows_are_named_by_themselves_or_their_group_in_the_papers_order():
    assert named_rows(["B", "A-h16", "base"]) == ["base", "A-h16", "B-dk16", "B-dk32"]
    assert named_rows(["all"]) == [row for row in TABLE_3 if row != "big"]
    assert named_rows(["big", "D"]) == ["D-drop0.0", "D-drop0.2", "D-ls0.0", "D-ls0.2", "big"]
    with pytest.raises(ValueError, match=r"--rows A-h2: .*expected all, A, B, .*A-h1, A-h4"):
        named_rows(["A-h2"])


@pytest.mark.parametrize("row", ["base", "A-h32", "C-d1024", "big"])
def test_a_recipe_of_the_papers_base_trains_the_papers_rows(row, tmp_path):
    ablation = Ablation(["--config", "wmt14_en_de_base"], tmp_path / "out")
    model, _, args = parse_arguments(ablation.words_of(row, seed=3))
    config = VaswaniConfig.from_table3(model.model, **model.model_overrides)
    assert model_fields(config) == model_fields(VaswaniConfig.from_table3(row))
    assert (args.max_steps, args.seed) == (300_000 if row == "big" else 100_000, 3)
    assert args.learning_rate is None  # by d_model
    assert (args.source_tokens_per_update, args.warmup_steps) == (25000, 4000)


@pytest.mark.parametrize("row", TABLE_3)
def test_every_row_can_be_at_the_scale_of_the_small_recipe(row, tmp_path, monkeypatch):
    monkeypatch.setenv("MULTI30K", "/data/multi30k")
    ablation = Ablation(["--config", "ablation_multi30k"], tmp_path / "out")
    model, data, args = parse_arguments(ablation.words_of(row, seed=0))
    assert model_fields(VaswaniConfig.from_table3(model.model, **model.model_overrides)) == model_fields(
        row_config(VaswaniConfig(**SMALL), row)
    )
    assert data.eval_files and args.max_steps // args.save_steps >= args.average_count == 5


# The runs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    files = write_demo_data(str(tmp_path_factory.mktemp("data")), train=200, val=10, test=10)
    return {split: [str(path) for path in paths] for split, paths in files.items()}


def words(data, output, *more: str, rows=("base", "A-h4")) -> list[str]:
    recipe = output.parent / "recipe.yaml"
    recipe.write_text(
        f"train_files: {json.dumps(data['train'])}\neval_files: {json.dumps(data['val'])}\n"
        "model_overrides: {d_model: 16, d_ff: 16, encoder_layers: 1, decoder_layers: 1, dropout: 0.1}\n"
        "vocab_size: 300\nwarmup_steps: 4\nmax_steps: 5\neval_strategy: 'no'\nsave_steps: 1\nlogging_steps: 1\n"
        "source_tokens_per_update: 1000\ntarget_tokens_per_update: 1000\nsave_total_limit: 2\n"
        "disable_tqdm: true\nreport_to: none\n"
    )
    own = ["--config", str(recipe), "--rows", *rows, "--output", str(output), "--average-last", "2"]
    return ["ablate", *own, "--", *more]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("ablation") / "runs"
    assert main(words(data, output)) == 0
    return output


def result(output, row, seed=42) -> dict:
    return json.loads((output / row / f"seed-{seed}" / "result.json").read_text())


def test_a_result_says_what_was_trained(finished):
    found = result(finished, "A-h4")
    assert found["differs"] == {"num_heads": 4, "d_k": 4, "d_v": 4}
    assert (found["row"], found["seed"], found["updates"], found["averaged"]) == ("A-h4", 42, 5, 2)
    # The embedding, and by the sizes of Table 3's caption 3 attentions, 2 feed-forward networks, 5 layer norms.
    attention, feed_forward, norm = 4 * 16 * 16, 2 * 16 * 16 + 16 + 16, 2 * 16
    assert found["parameters"] == 300 * 16 + 3 * attention + 2 * feed_forward + 5 * norm
    assert found["target_tokens"] > 0 and found["seconds"] > 0
    assert result(finished, "base")["differs"]["num_heads"] == 8
    assert result(finished, "base")["parameters"] == found["parameters"]


def test_a_run_shorter_than_a_logging_step_has_its_tokens(data, tmp_path):
    output = tmp_path / "runs"
    assert main(words(data, output, "--max_steps", "2", "--logging_steps", "100", rows=["base"])) == 0
    found = result(output, "base")
    assert found["updates"] == 2 and found["source_tokens"] > 0 and found["target_tokens"] > 0
    assert f"target tokens: {found['target_tokens']:,};" in (output / "table.md").read_text()


def test_a_row_is_scored_by_the_mean_of_its_last_checkpoints(finished, data, monkeypatch):
    run = finished / "A-h4" / "seed-42"
    averaged = json.loads((run / "average-last" / "averaged_from.json").read_text())["checkpoints"]
    assert [Path(name).name for name in averaged] == ["checkpoint-4", "checkpoint-5"]
    model, tokenizer = (kind.from_pretrained(run / "average-last") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    sources, references = (Path(file).read_text(encoding="utf-8").splitlines() for file in data["val"])
    cost, count, translations = 0.0, 0, []
    for source, reference in zip(sources, references):
        inputs, labels = (tokenizer(text, return_tensors="pt") for text in (source, reference))
        start = torch.tensor([[model.config.decoder_start_token_id]])
        read = torch.cat([start, labels["input_ids"][:, :-1]], dim=1)
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=read).logits[0]
        cost += torch.nn.functional.cross_entropy(logits, labels["input_ids"][0], reduction="sum").item()
        count += len(logits)
        translations.append(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
    assert result(finished, "A-h4")["perplexity"] == pytest.approx(math.exp(cost / count), rel=1e-4)

    def returned(*args, **kwargs):
        found.extend(translate(*args, **kwargs))
        return [*references[:-1], "Das ist etwas anderes ."]  # better than a model of five updates

    found = []
    monkeypatch.setattr("training.ablation.experiment.translate", returned)
    args = SimpleNamespace(output_dir=str(run), eval_tokens_per_device=500, bleu_tokenize="13a", disable_tqdm=True)
    evaluated = evaluate(SimpleNamespace(args=args, eval_dataset={"source": sources, "target": references}))
    assert found == translations and any(found)
    bleu = sacrebleu.corpus_bleu([*references[:-1], "Das ist etwas anderes ."], [references]).score
    assert evaluated["bleu"] == pytest.approx(bleu) and 50 < bleu < 100
    assert (evaluated["metric"], evaluated["averaged"]) == ("sacreBLEU", 2)


def test_all_rows_have_one_vocabulary(finished):
    texts = {path.read_text() for path in finished.glob("*/seed-42/tokenizer.json")}
    assert len(list(finished.glob("*/seed-42/tokenizer.json"))) == 2
    assert texts == {(finished / "tokenizer" / "tokenizer.json").read_text()}


def test_a_killed_run_goes_on_in_the_middle_and_a_finished_one_is_left_alone(
    finished, data, tmp_path, monkeypatch, capsys
):
    output, step, taken = tmp_path / "runs", VaswaniTrainer.training_step, []

    def killed(self, *args, **kwargs):
        run = Path(self.args.output_dir).parent.name
        taken.append((run, self.state.global_step + 1))
        if not again and taken[-1] == ("A-h4", 4):
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    again = False
    monkeypatch.setattr(VaswaniTrainer, "training_step", killed)
    assert main(words(data, output)) == 130
    before = (output / "base" / "seed-42" / "result.json").read_text()
    assert not (output / "A-h4" / "seed-42" / "result.json").exists()
    assert "A-h4" not in json.loads((output / "table.json").read_text())["rows"]

    again, taken[:] = True, []
    assert main(words(data, output)) == 0
    assert sorted(set(taken)) == [("A-h4", 4), ("A-h4", 5)]
    assert (output / "base" / "seed-42" / "result.json").read_text() == before
    for name in ("perplexity", "bleu"):  # as if nothing had happened
        assert result(output, "A-h4")[name] == result(finished, "A-h4")[name]

    taken.clear()
    capsys.readouterr()
    assert main(words(data, output)) == 0
    assert taken == []
    assert "| A-h4 |" in capsys.readouterr().out


def test_what_another_command_is_at_is_passed_over(data, tmp_path, caplog):
    caplog.set_level("INFO")
    output = tmp_path / "runs"
    (output / "base" / "seed-42").mkdir(parents=True)
    with FileLock(output / "base" / "seed-42" / "run.lock"):
        assert main(words(data, output, rows=["base", "B-dk32"])) == 0
    assert "base/seed-42: another run is at work here, process" in caplog.text
    assert not (output / "base" / "seed-42" / "result.json").exists()
    assert result(output, "B-dk32")["differs"] == {"d_k": 1}
    assert "no finished run of base" in (output / "table.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max_steps", "6"], "max_steps (5, now 6)"),
        (["--vocab_size", "310"], "vocab_size (300, now 310)"),
        (["--learning_rate", "0.01"], "learning_rate ("),
        (["--bleu_tokenize", "none"], "bleu_tokenize (13a, now none)"),
        (["--model_overrides", '{"d_model": 32}'], "model.d_model (16, now 32)"),
    ],
)
def test_a_folder_keeps_to_one_recipe(finished, data, capsys, more, message):
    assert main(words(data, finished, *more)) == 1
    error = capsys.readouterr().err
    assert f"{finished} has rows of another recipe" in error and message in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max_steps", "-1", "--num_train_epochs", "2"], "num_train_epochs: "),
        (["--model_overrides", '{"d_model": 16, "num_heads": 1}'], "Row A-h4: num_heads would be 1 x 1/2 = 1/2"),
    ],
)
def test_what_cannot_be_compared_is_an_error_before_anything_is_trained(data, tmp_path, capsys, more, message):
    assert main(words(data, tmp_path / "runs", *more)) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_evaluation_data_there_is_nothing_to_compare(data, tmp_path, capsys):
    command, recipe = words(data, tmp_path / "runs"), tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("eval_files:", "# eval_files:"))
    assert main(command) == 1
    assert "No evaluation data to compare the rows on" in capsys.readouterr().err


def test_what_the_command_sets_itself_cannot_be_set(data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(words(data, tmp_path / "runs", "--output-dir=elsewhere"))
    assert "--output-dir=elsewhere after --: ablate sets it itself" in capsys.readouterr().err


# The table


def runs(row: str, perplexities: list[float], bleus: list[float], differs: dict | None = None) -> list[dict]:
    rest = {"differs": differs or {}, "parameters": 2_500_000, "updates": 400, "averaged": 5, "metric": "sacreBLEU"}
    rest |= {"source_tokens": 1000, "target_tokens": 900, "seconds": 1800.0, "evaluation_seconds": 36.0}
    return [
        {"row": row, "seed": seed, "perplexity": perplexity, "bleu": bleu, "signature": "tok:13a", **rest}
        for seed, (perplexity, bleu) in enumerate(zip(perplexities, bleus))
    ]


def test_differences_their_errors_and_verdicts_are_those_computed_by_hand():
    # Squares of deviations of BLEU: base 1 + 0 + 1, C-N2 1 + 0 + 1, A-h16 none; freedom 2 + 2 + 0: s = 1.
    results = runs("base", [10.0, 11.0, 12.0], [29.0, 30.0, 31.0])
    results += runs("C-N2", [14.0, 15.0, 16.0], [26.0, 27.0, 28.0]) + runs("A-h16", [10.9], [30.5])
    found = summary(results)
    assert found["spread"] == {"perplexity": 1.0, "bleu": 1.0}
    bleu = found["rows"]["C-N2"]["bleu"]
    assert (bleu["mean"], bleu["spread"], bleu["difference"]) == (27.0, 1.0, -3.0)
    assert bleu["standard_error"] == pytest.approx(math.sqrt(2 / 3))  # twice it: 1.63
    assert (bleu["paper_difference"], bleu["verdict"]) == (-2.1, "agrees")  # 23.7 - 25.8
    assert found["rows"]["C-N2"]["perplexity"]["paper_difference"] == 1.19  # 6.11 - 4.92
    assert found["rows"]["A-h16"]["bleu"]["standard_error"] == pytest.approx(math.sqrt(4 / 3))
    assert found["rows"]["A-h16"]["bleu"]["spread"] is None
    assert found["rows"]["A-h16"]["bleu"]["verdict"] == "agrees"  # the paper has no difference either
    assert found["rows"]["A-h16"]["perplexity"]["verdict"] == "within noise"  # the paper has -0.01
    assert found["cost"]["updates"] == 2800 and found["cost"]["target_tokens"] == 6300
    assert found["runs of unknown time"] == 0
    results[0]["target_tokens"] = results[1]["seconds"] = None
    found = summary(results)
    assert found["cost"]["target_tokens"] == 5400 and found["runs of unknown time"] == 2


@pytest.mark.parametrize(
    ("here", "error", "paper", "expected"),
    [
        (-1.0, 0.4, -0.9, "agrees"),
        (-1.0, 0.6, -0.9, "within noise"),
        (1.0, 0.4, -0.9, "does not agree"),
        (1.0, 0.4, 0.0, "does not agree"),
        (1.0, 0.6, 0.0, "agrees"),
        (-0.1, None, -0.9, "agrees"),
        (0.1, None, -0.9, "does not agree"),
    ],
)
def test_the_verdict_follows_the_stated_rule(here, error, paper, expected):
    assert verdict(here, error, paper) == expected


def test_the_markdown_shows_both_tables_side_by_side():
    results = runs("base", [10.0, 12.0], [29.0, 31.0], {"encoder_layers": 3, "decoder_layers": 3, "d_ff": 512})
    results += runs("C-ff4096", [9.0], [31.5], {"d_ff": 1024})
    text = to_markdown(summary(results))
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert lines["| base"].startswith(
        "| base |  | N 3, d_ff 512 | 400 | 2.50 | 2 | 11.00 ± 1.41 | 30.00 ± 1.41 | 65 |"
    )
    assert lines["| C-ff4096"] == (
        "| C-ff4096 | d_ff 4096 | d_ff 1024 | 400 | 2.50 | 1 | 9.00 | 31.50 | 90 | 4.75 | 26.2 "
        "| -2.00 | -0.17 | +1.50 | +0.4 |"
    )
    assert "more than twice its standard error" in text
    assert (
        "- BLEU, of 1 rows: within noise 1 (C-ff4096)." in text
    )  # twice the error is 2 * 1.41 * sqrt(1 + 1/2) = 3.46
    assert (
        "Runs: 3; updates: 1,200; source tokens (with padding): 3,000; target tokens: 2,700; hours of training: 1.50"
        in text
    )


def test_with_one_seed_the_noise_is_said_to_be_unknown():
    text = to_markdown(summary(runs("base", [10.0], [30.0]) + runs("E-learned", [11.0], [29.0])))
    assert "No row has two seeds, so the noise is unknown" in text
    assert "- PPL, of 1 rows: does not agree 1 (E-learned)." in text
    assert "- BLEU, of 1 rows: agrees 1 (E-learned)." in text


def test_the_papers_figures_are_there_for_every_row():
    assert set(PAPER) == set(TABLE_3)


def test_the_table_alone_is_drawn_of_what_is_finished(tmp_path, capsys):
    for found in runs("base", [10.0, 11.0], [30.0, 31.0]) + runs("D-ls0.0", [9.0], [29.0]):
        folder = tmp_path / found["row"] / f"seed-{found['seed']}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(found))
    assert main(["ablate", "--output", str(tmp_path), "--table-only"]) == 0
    assert "| D-ls0.0 | label smoothing 0.0 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "table.json").read_text())["rows"]["base"]["bleu"]["mean"] == 30.5
    assert (tmp_path / "table.md").is_file()


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for found in runs("base", [10.0, 11.0], [30.0, 31.0]) + runs("big", [9.0], [33.0]):
        folder = tmp_path / found["row"] / f"seed-{found['seed']}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(found))
    assert main(["ablate", "--output", str(tmp_path), "--table-only"]) == 0
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_finished_run_there_is_no_table(tmp_path, capsys):
    assert main(["ablate", "--output", str(tmp_path), "--table-only"]) == 1
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{cut", "not a JSON object"),
        ("3", "expected a JSON object, found 3"),
        ('{"row": "base"}', "no field 'averaged'"),
        ({"seed": "x"}, "'seed' expected int, got str (value: 'x')"),
        ({"row": "Z-h4"}, "row: expected one of Table 3, found 'Z-h4'"),
        ({"bleu": math.nan}, "bleu: expected a finite number, found nan"),
        ({"perplexity": math.inf}, "perplexity: expected a finite number, found inf"),
    ],
)
def test_a_broken_result_is_one_line_that_names_file_and_field(tmp_path, capsys, text, message):
    path = tmp_path / "base" / "seed-1" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(text if isinstance(text, str) else json.dumps({**runs("base", [5.0], [20.0])[0], **text}))
    assert main(["ablate", "--output", str(tmp_path), "--table-only"]) == 1
    error = capsys.readouterr().err
    assert f"{path}: " in error and message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [-math.inf, math.nan, -800.0])
def test_a_run_whose_perplexity_is_not_finite_is_an_error(monkeypatch, tmp_path, number):
    monkeypatch.setattr("training.ablation.experiment.load_checkpoint", lambda name: (None, None))
    monkeypatch.setattr("training.evaluation.perplexity.token_log_probabilities", lambda *_: [[number]])
    args = SimpleNamespace(output_dir=tmp_path, eval_tokens_per_device=100)
    pairs = {"source": ["a"], "target": ["b"]}
    with pytest.raises(ValueError, match=r"average-last: .*(infinite|NaN)|reference 1 is not a number"):
        evaluate(SimpleNamespace(args=args, eval_dataset=pairs))
