"""Last lines of a training: the result, where the model is, and the next command."""

import shlex
from pathlib import Path

from .arguments import DataArguments
from .checkpoints import checkpoint_name
from .fine_tuning import ADAPTER_NAME
from .trainer import VaswaniTrainer


METRICS = {
    "eval_bleu": "BLEU {:.2f}",
    "eval_f1": "F1 {:.2f}",
    "eval_loss": "loss {:.3f}",
    "eval_perplexity": "perplexity {:.2f}",
}
AVERAGED = 5  # checkpoints; the paper's number for the base model (section 6.1)


def closing_lines(trainer: VaswaniTrainer, data: DataArguments) -> list[str]:
    """Describe a finished run, and name the next command: `average`, or `translate` if there is nothing to average.

    Args:
        trainer (`VaswaniTrainer`): Trainer after training.
        data (`DataArguments`): Data of the run. `translate` is shown with its evaluation data.
    """
    args, state = trainer.args, trainer.state
    run = Path(args.output_dir)
    best = state.best_global_step if state.best_metric is not None else None
    line = f"{run}: trained {state.global_step:,} updates"
    if best:
        of_average = " of the average" if args.eval_average else ""
        line += f", best {METRICS[args.best_metric].format(state.best_metric)}{of_average} at update {best:,}"
    line += "."
    if best and args.load_best_model_at_end:
        line += " It has these best weights."
    elif best and best != state.global_step:
        place = f"; the best are in {checkpoint_name(best)}" if (run / checkpoint_name(best)).is_dir() else ""
        line += f" It has the last weights{'' if args.eval_average else place}."
    return [line, f"Next: {shlex.join(_next_command(trainer, data))}"]


def _next_command(trainer: VaswaniTrainer, data: DataArguments) -> list[str]:
    args, run = trainer.args, Path(trainer.args.output_dir)
    model = run
    if args.average is not None:
        model = run / f"average-{args.average}"
    elif not args.load_best_model_at_end and (count := _last_in_place(trainer)) > 1:
        output = run / "average"
        if output.exists():
            output = run / f"average-{trainer.state.global_step}"
        return ["hf-vaswani", "average", "--run", str(run), "--last", str(count), "--output", str(output)]
    source = data.eval_files[0] if len(data.eval_files) == 2 else "FILE"
    output = run / f"translations.{data.target_lang}"
    return ["hf-vaswani", "translate", "--model", str(model), "--input", source, "--output", str(output)]


def _last_in_place(trainer: VaswaniTrainer) -> int:
    """Number of the run's last regular checkpoints that exist, at most `AVERAGED`; 0 for adapters."""
    if (Path(trainer.args.output_dir) / ADAPTER_NAME).is_dir():
        return 0
    count = 0
    for step in reversed(trainer.saved_steps[-AVERAGED:]):
        if not (Path(trainer.args.output_dir) / checkpoint_name(step)).is_dir():
            break
        count += 1
    return count
