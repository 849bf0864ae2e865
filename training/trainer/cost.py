"""Cost of a run in tokens and time, computed from its log."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Cost:
    """Tokens and time of a run. Unknown values are `None`.

    Attributes:
        updates (`int`): Optimiser steps.
        epochs (`float`): Passes over the data.
        source_tokens (`int`, *optional*): Source tokens on all devices, padding included, derived from the Trainer's
            `total_flos`.
        target_tokens (`int`, *optional*): Target tokens on all devices, without padding; estimated from the logged
            throughput.
        seconds (`float`, *optional*): Wall-clock time, evaluation and saving included; estimated from the throughput
            if the run was interrupted.
        measured_seconds (`float`, *optional*): Logged wall-clock time since the last start or resumption.
        measured_updates (`int`, *optional*): Optimiser steps since the last start or resumption.
    """

    updates: int
    epochs: float
    source_tokens: int | None = None
    target_tokens: int | None = None
    seconds: float | None = None
    measured_seconds: float | None = None
    measured_updates: int | None = None


def cost(state: dict, parameters_without_embeddings: int, devices: int) -> Cost:
    """Compute the cost of a run from the Trainer's state.

    The log holds the target tokens per second of each logging interval, but not their number. All updates have about
    the same number of target tokens. That number follows from the logged runtime and updates of the last start.

    Args:
        state (`dict`): Content of `trainer_state.json`.
        parameters_without_embeddings (`int`): Parameters that `total_flos` counts, with 6 operations per parameter
            and source token.
        devices (`int`): Number of devices. The logged throughput is that of one device.
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
    last_updates = min(updates, round(ends[-1]["train_steps_per_second"] * runtime))
    rates = [entry for entry in log if entry.get("target_tokens_per_second")]
    steps = [0, *(entry["step"] for entry in rates)]
    # Training seconds of each logging interval, divided by the target tokens of an update on one device.
    unit_seconds = [(now - before) / e["target_tokens_per_second"] for (before, now), e in zip(pairwise(steps), rates)]
    last_unit_seconds = sum(s for s, before in zip(unit_seconds, steps) if before >= updates - last_updates)
    known |= {"measured_seconds": runtime, "measured_updates": last_updates}
    if not last_unit_seconds:
        return Cost(**known, seconds=runtime if last_updates == updates else None)
    evaluation_seconds = {e["step"]: e["eval_runtime"] for e in log if "eval_runtime" in e}
    last_evaluation_seconds = sum(s for step, s in evaluation_seconds.items() if step > updates - last_updates)
    tokens = (runtime - last_evaluation_seconds) / last_unit_seconds  # of an update on one device
    estimate = tokens * sum(unit_seconds) + sum(evaluation_seconds.values())
    seconds = runtime if last_updates == updates else estimate
    return Cost(**known, target_tokens=round(tokens * devices * updates), seconds=seconds)


def operations(model, source_tokens: int, target_tokens: int) -> float:
    """Floating point operations of a training run, with 6 per weight and token.

    Source tokens count for the weights of the encoder, target tokens for those of the decoder and output projection.
    The products of queries, keys and values, embedding look-ups and the padding of targets are left out.
    """
    encoder, decoder = (
        sum(weight.numel() for weight in stack.layers.parameters())
        for stack in (model.model.encoder, model.model.decoder)
    )
    decoder += model.lm_head.weight.numel()
    return 6.0 * (encoder * source_tokens + decoder * target_tokens)
