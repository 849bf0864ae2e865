import io
import logging
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from support.runs import make_trainer, train_argv
from training.cli import main
from training.trainer.closing import closing_lines
from training.trainer.console import ConsoleLog, hide_library_bars
from training.trainer.trainer import VaswaniTrainer


TRAINING = {
    "loss": 3.41249,
    "grad_norm": 1.5,
    "learning_rate": 0.0012,
    "target_tokens_per_second": 4512.4,
    "padding_share": 0.0204,
    "epoch": 1.2,
}
EVALUATION = {"eval_loss": 2.1, "eval_perplexity": 8.16617, "eval_bleu": 41.31, "eval_runtime": 12.04, "epoch": 1.2}


def arguments(**fields) -> SimpleNamespace:
    return SimpleNamespace(**{"disable_tqdm": True, "world_size": 1, **fields})


def state(step: int, **fields) -> SimpleNamespace:
    return SimpleNamespace(**{"global_step": step, "max_steps": 1570, "is_world_process_zero": True, **fields})


def printed(capsys, logs, log=None, args=None, **fields) -> str:
    (log or ConsoleLog(label_smoothing=True)).on_log(args or arguments(), state(200, **fields), None, logs=logs)
    return capsys.readouterr().out


def test_a_log_is_one_line(capsys):
    line = "update  200/1570  label-smoothed loss 3.412  lr 1.2e-03  4,512 tok/s  pad 2%\n"
    assert printed(capsys, TRAINING) == line
    assert printed(capsys, TRAINING, ConsoleLog(label_smoothing=False)) == line.replace("label-smoothed ", "")
    assert printed(capsys, TRAINING, args=arguments(world_size=2)) == line.replace("tok/s", "tok/s per device")
    assert printed(capsys, EVALUATION) == "eval: loss 2.100, perplexity 8.17, BLEU 41.31 (12.0 s)\n"
    without_bleu = {name: value for name, value in EVALUATION.items() if name != "eval_bleu"}
    assert printed(capsys, without_bleu) == "eval: loss 2.100, perplexity 8.17 (12.0 s)\n"


def test_only_the_main_process_prints(capsys):
    assert printed(capsys, TRAINING, is_world_process_zero=False) == ""


def test_without_a_bar_lines_have_the_time_left_since_this_start(capsys, monkeypatch):
    """Resumed at update 100, at 2 updates a second."""
    clock, log = [1000.0], ConsoleLog(label_smoothing=True)
    monkeypatch.setattr("training.trainer.console.time.monotonic", lambda: clock[0])
    log.on_train_begin(arguments(), state(100), None)
    clock[0] += 50
    assert printed(capsys, TRAINING, log).endswith("  pad 2%  11:25 left\n")  # 1370 updates
    assert printed(capsys, EVALUATION, log).startswith("update  200/1570  eval: ")


def test_a_stock_callback_prints_nothing_more(tmp_path, tokenizer, pairs):
    for hidden in (True, False):
        callbacks = make_trainer(tmp_path, tokenizer, pairs, disable_tqdm=hidden).callback_handler.callbacks
        assert not any(isinstance(callback, (PrinterCallback, ProgressCallback)) for callback in callbacks)
        assert sum(isinstance(callback, ConsoleLog) for callback in callbacks) == 1


class Terminal(io.StringIO):
    """Standard output and error of a terminal; `rows` are the lines that it shows in the end."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        rows = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for text in line.split("\r"):
                shown = text + shown[len(text) :]
            rows.append(shown.rstrip())
        return rows


def open_terminal(monkeypatch) -> Terminal:
    """Not a fixture: pytest replaces the streams again when a test begins."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(screen)])
    return screen


def test_lines_are_above_the_bar(data, tmp_path, monkeypatch):
    save = VaswaniTrainer._save_checkpoint

    def save_and_warn(self, *args):
        save(self, *args)
        logging.getLogger("training.anywhere").warning("a warning")

    monkeypatch.setattr(VaswaniTrainer, "_save_checkpoint", save_and_warn)
    terminal = open_terminal(monkeypatch)
    assert main(train_argv(data, tmp_path, "--max_steps", "4", "--disable_tqdm", "false")) == 0
    rows = terminal.rows()
    number = r"\d+\.\d+"
    training = rf"update \d/4  label-smoothed loss {number}  lr {number}e-\d\d  [\d,]+ tok/s  pad \d+%"
    evaluation = rf"update 4/4  eval: loss {number}, perplexity [\d,]+\.\d\d, BLEU {number} \({number} s\)"
    assert [row[:10] for row in rows if re.fullmatch(training, row)] == [f"update {step}/4" for step in (1, 2, 3, 4)]
    assert sum(bool(re.fullmatch(evaluation, row)) for row in rows) == 1
    assert rows.count("a warning") == 2
    bars = [row for row in rows if row.startswith("Training")]
    assert len(bars) == 1 and "4/4 updates" in bars[0]
    assert not any("{" in row or "shards" in row or "weights:" in row for row in rows)


def test_an_error_is_below_the_bar(data, tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(VaswaniTrainer, "_save_checkpoint", fail)
    terminal = open_terminal(monkeypatch)
    assert main(train_argv(data, tmp_path, "--max_steps", "4", "--disable_tqdm", "false")) == 1
    assert "hf-vaswani train: the disk is full" in terminal.rows()
    assert any("1/4 updates" in row or "2/4 updates" in row for row in terminal.rows())


def test_in_a_file_there_is_no_bar(data, tmp_path, capsys):
    assert main(train_argv(data, tmp_path, "--max_steps", "2", "--disable_tqdm", "false")) == 0
    out, error = capsys.readouterr()
    assert re.search(r"^update 2/2  .* 00:00 left$", out, re.MULTILINE)
    assert "\r" not in out + error and "%|" not in error


def test_reading_and_writing_weights_has_no_bar_but_a_download_has():
    enabled = is_progress_bar_enabled()
    try:
        enable_progress_bar()
        hide_library_bars(arguments())
        assert not is_progress_bar_enabled() and not are_progress_bars_disabled()
        disable_progress_bar()  # of downloads too
        hide_library_bars(arguments())
        assert are_progress_bars_disabled()
    finally:
        enable_progress_bar() if enabled else disable_progress_bar()


# The last lines


def next_command(out: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if line.startswith("Next: hf-vaswani "))
    return shlex.split(line.removeprefix("Next: hf-vaswani "))


def test_a_run_ends_with_the_next_command_and_this_runs(data, tmp_path, capsys):
    run = tmp_path / "a run"
    assert main(train_argv(data, run, "--max_steps", "4")) == 0
    out = capsys.readouterr().out
    command = next_command(out)
    assert command == ["average", "--run", str(run), "--last", "2", "--output", str(run / "average")]
    assert re.search(rf"^{re.escape(str(run))}: trained 4 updates, best BLEU \d+\.\d\d at update 4\.$", out, re.M)
    assert main(command) == 0

    assert main(train_argv(data, run, "--max_steps", "6", "--resume", "--average", "last")) == 0
    command = next_command(capsys.readouterr().out)
    assert command[:3] == ["translate", "--model", str(run / "average-last")]
    assert main([*command, "--num-beams", "1"]) == 0
    assert len((run / "translations.de").read_text().splitlines()) == 10


def finished(run, tmp_path, saved=(), **fields) -> SimpleNamespace:
    for step in saved:
        (run / f"checkpoint-{step}").mkdir(parents=True)
    args = {"output_dir": str(run), "average": None, "eval_average": False, "load_best_model_at_end": False}
    args |= {"best_metric": "eval_bleu"}
    state = {"global_step": 1200, "best_global_step": 500, "best_metric": 41.3}
    return SimpleNamespace(
        args=SimpleNamespace(**{**args, **{name: value for name, value in fields.items() if name in args}}),
        state=SimpleNamespace(**{**state, **fields.get("state", {})}),
        saved_steps=[*range(100, 1201, 100)],
    )


DATA = SimpleNamespace(train_files=["train.tsv"], eval_files=["val.en", "val.de"], target_lang="de")


@pytest.mark.parametrize(
    ("fields", "last", "command"),
    [
        ({}, "best BLEU 41.30 at update 500. It has the last weights.", "translate --model RUN --input val.en"),
        (
            {"saved": (500, 1000, 1100, 1200)},
            "at update 500. It has the last weights; the best are in checkpoint-500.",
            "average --run RUN --last 3 --output RUN/average",
        ),
        (
            {"saved": (500, 1100, 1200), "load_best_model_at_end": True},
            "at update 500. It has these best weights.",
            "translate --model RUN ",
        ),
        (
            {"saved": (1100, 1200), "average": "ema", "eval_average": True},
            "best BLEU 41.30 of the average at update 500. It has the last weights.",
            "translate --model RUN/average-ema --input",
        ),
        ({"state": {"best_global_step": None, "best_metric": None}}, "trained 1,200 updates.", "translate"),
        (
            {"best_metric": "eval_loss", "state": {"best_metric": 2.1}},
            "best loss 2.100 at update 500.",
            "translate",
        ),
    ],
)
def test_the_last_lines_are_true_for_the_run(tmp_path, fields, last, command):
    run = tmp_path / "run"
    first, following = closing_lines(finished(run, tmp_path, **fields), DATA)
    assert first.startswith(f"{run}: trained 1,200 updates") and last in first
    assert following.startswith("Next: hf-vaswani " + command.replace("RUN", str(run)))


def test_an_average_that_exists_is_not_named_and_adapters_are_not_averaged(tmp_path):
    run = tmp_path / "run"
    trainer = finished(run, tmp_path, saved=(1100, 1200))
    (run / "average").mkdir()
    assert closing_lines(trainer, DATA)[1].endswith(f"--output {run}/average-1200")
    (run / "adapter").mkdir()
    assert closing_lines(trainer, DATA)[1].startswith("Next: hf-vaswani translate")
