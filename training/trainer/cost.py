"""Tokens, time and floating point operations of a run, from its log."""

from dataclasses import dataclass
from itertools import pairwise


# What it cost


@dataclass(frozen=True)
class Cost:
    """Tokens and time of a run; what is not known is `None`.

    Attributes:
        updates (`int`): Optimiser steps.
        epochs (`float`): Passes over the data.
        source_tokens (`int`, *optional*): Padding included, of all devices: the Trainer counts them for its
            `total_flos`.
        target_tokens (`int`, *optional*): Without padding; an estimate from the logged rates and the time.
        seconds (`float`, *optional*): With evaluation and saving; of an interrupted run an estimate from the rates.
        measured_seconds (`float`, *optional*): Of the last start, as logged.
        measured_updates (`int`, *optional*): Of the last start.
    """

    updates: int
    epochs: float
    source_tokens: int | None = None
    target_tokens: int | None = None
    seconds: float | None = None
    measured_seconds: float | None = None
    measured_updates: int | None = None


def cost(state: dict, parameters_without_embeddings: int, devices: int) -> Cost:
    """Reads tokens and time out of a Trainer's state.

    The log has the rate of target tokens between one line and the next, not their number. As each update has about as
    many, and the time of the last start is logged with the number of its updates, the number follows.

    Args:
        state (`dict`): `trainer_state.json`.
        parameters_without_embeddings (`int`): As the Trainer counts for `total_flos`, 6 of which are an operation.
        devices (`int`): The rates are those of one.
    """
    updates, log = state["global_step"], state["log_history"]
    operations = 6 * parameters_without_embeddings
    source = round(state["total_flos"] / operations) if state.get("total_flos") and operations else None
    known = {"updates": updates, "epochs": state["epoch"] or 0.0, "source_tokens": source}
    ends = [entry for entry in log if {"train_runtime", "train_steps_per_second"} <= entry.keys()]
    ends = [entry for entry in ends if entry["step"] == updates]
    if not ends:
        return Cost(**known)
    runtime = ends[-1]["train_runtime"]
    last = min(updates, round(ends[-1]["train_steps_per_second"] * runtime))
    rates = [entry for entry in log if entry.get("target_tokens_per_second")]
    steps = [0, *(entry["step"] for entry in rates)]
    # Seconds are this, times the target tokens of an update on a device.
    seconds = [(now - before) / e["target_tokens_per_second"] for (before, now), e in zip(pairwise(steps), rates)]
    of_last = sum(s for s, before in zip(seconds, steps) if before >= updates - last)
    known |= {"measured_seconds": runtime, "measured_updates": last}
    if not of_last:
        return Cost(**known, seconds=runtime if last == updates else None)
    idle = {e["step"]: e["eval_runtime"] for e in log if "eval_runtime" in e}
    tokens = (runtime - sum(s for step, s in idle.items() if step > updates - last)) / of_last
    whole = runtime if last == updates else tokens * sum(seconds) + sum(idle.values())
    return Cost(**known, target_tokens=round(tokens * devices * updates), seconds=whole)


def operations(model, source_tokens: int, target_tokens: int) -> float:
    """Floating point operations of training, 6 for each weight and token: the encoder's for source tokens, the
    decoder's and the output projection's for target tokens.

    Attention between tokens, embedding look-ups and padding of the targets are left out.
    """
    encoder, decoder = (
        sum(weight.numel() for weight in stack.layers.parameters())
        for stack in (model.model.encoder, model.model.decoder)
    )
    decoder += model.lm_head.weight.numel()
    return 6.0 * (encoder * source_tokens + decoder * target_tokens)
