"""Draw a run: loss, learning rate, and BLEU or F1 if it was measured, against the step, from the Trainer's own log."""

from pathlib import Path

from ..files import save_whole
from ..trainer.checkpoints import STATE_NAME, read_state


LOSS = ("loss per token", (("loss", "training (label-smoothed)"), ("eval_loss", "evaluation")))
BLEU = ("BLEU", (("eval_bleu", "evaluation"),))
F1 = ("bracketing F1", (("eval_f1", "evaluation"),))  # of a parser
LEARNING_RATE = ("learning rate", (("learning_rate", "learning rate"),))


def draw_curves(run: str, output: str) -> None:
    """Write a picture of a run's curves.

    Args:
        run (`str`): Folder of a finished run or of a checkpoint, with its `trainer_state.json`.
        output (`str`): Picture to write; the file extension selects the format.

    Raises:
        FileNotFoundError: The folder has no `trainer_state.json`.
        ValueError: The `trainer_state.json` is malformed.
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'hf-vaswani[plots]'.") from error

    state = Path(run) / STATE_NAME
    if not state.is_file():
        raise FileNotFoundError(
            f"{state}: no such file; expected the folder of a finished run or of one of its checkpoints."
        )
    history = read_state(Path(run)).get("log_history", [])
    keys = {key for entry in history for key in entry}
    panels = [panel for panel in (LOSS, BLEU, F1, LEARNING_RATE) if keys & {key for key, _ in panel[1]}] or [LOSS]
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for key, label in curves:
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            if points:
                axes.plot(*zip(*points), label=label, marker="." if key.startswith("eval") else None)
        axes.set(title=title, xlabel="step")
        if axes.lines:
            axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    save_whole(figure, Path(output), dpi=120)
