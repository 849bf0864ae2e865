"""Training log on the console: one line per logging step and per evaluation, above the progress bar."""

import sys
import time

import datasets
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.utils.logging import disable_progress_bar

from .arguments import VaswaniTrainingArguments


def shows_bars(args: VaswaniTrainingArguments) -> bool:
    """Return `True` if progress bars are on and standard error is a terminal; in a file they would be noise."""
    return not args.disable_tqdm and sys.stderr.isatty()


def hide_library_bars(args: VaswaniTrainingArguments) -> None:
    """Hide transformers' bars of reading and writing weights, and unless `shows_bars`, those of `datasets`."""
    downloads_have_none = are_progress_bars_disabled()
    disable_progress_bar()  # also hides the bars of downloads
    if not downloads_have_none:
        enable_progress_bars()
    if not shows_bars(args):
        datasets.disable_progress_bars()


class ConsoleLog(TrainerCallback):
    """Print the Trainer's log on standard output, one line per entry, and show a progress bar on a terminal.

    Without a bar, the lines give the remaining time. Only the main process prints. The log in `trainer_state.json`
    keeps every field.

    Args:
        label_smoothing (`bool`): The model smooths its loss in training, so its exponential is no perplexity.
    """

    def __init__(self, label_smoothing: bool):
        self.loss = "label-smoothed loss" if label_smoothing else "loss"
        self._bar: tqdm | None = None  # during training
        self._first_step, self._started = 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._started = state.global_step, time.monotonic()
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            bar_format="Training {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} updates, {remaining} left",
            dynamic_ncols=True,
            disable=not (state.is_world_process_zero and shows_bars(args)),
        )

    def on_step_end(self, args, state, control, **kwargs):
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args, state, control, logs, **kwargs):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            line = self._training_line(args, state, logs)
        elif name := next((name for name in logs if name.endswith("_perplexity")), None):
            line = self._evaluation_line(state, logs, name.removesuffix("_perplexity"))
        else:
            return
        tqdm.write(line)
        sys.stdout.flush()  # for those who follow a file

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self) -> None:
        """End the progress bar, so that what follows begins on a line of its own."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _training_line(self, args: VaswaniTrainingArguments, state: TrainerState, logs: dict[str, float]) -> str:
        parts = [_update(state), f"{self.loss} {logs['loss']:.3f}"]
        if "learning_rate" in logs:
            parts.append(f"lr {logs['learning_rate']:.1e}")
        if "target_tokens_per_second" in logs:
            per_device = " per device" if args.world_size > 1 else ""
            parts.append(f"{logs['target_tokens_per_second']:,.0f} tok/s{per_device}")
            parts.append(f"pad {logs['padding_share']:.0%}")
        updates = state.global_step - self._first_step
        if self._bar is not None and self._bar.disable and updates:
            left = (time.monotonic() - self._started) / updates * (state.max_steps - state.global_step)
            parts.append(f"{tqdm.format_interval(left)} left")
        return "  ".join(parts)

    def _evaluation_line(self, state: TrainerState, logs: dict[str, float], prefix: str) -> str:
        parts = [f"loss {logs[f'{prefix}_loss']:.3f}", f"perplexity {logs[f'{prefix}_perplexity']:,.2f}"]
        if f"{prefix}_bleu" in logs:
            parts.append(f"BLEU {logs[f'{prefix}_bleu']:.2f}")
        if f"{prefix}_f1" in logs:
            parts.append(f"F1 {logs[f'{prefix}_f1']:.2f}")
        line = f"{prefix}: {', '.join(parts)} ({logs[f'{prefix}_runtime']:.1f} s)"
        return line if self._bar is None else f"{_update(state)}  {line}"


def _update(state: TrainerState) -> str:
    total = str(state.max_steps)
    return f"update {state.global_step:>{len(total)}}/{total}"
