"""Differences of a run from the paper's model of the nearest size."""

import math

from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig

from ..paper import AVERAGED, FRENCH_BIG, GENERATION, UPDATES, VOCABULARY, paper_learning_rate
from ..trainer.arguments import defaults
from ..trainer.manifest import model_fields
from .records import Run, averaged_checkpoints


# Training arguments that the paper gives, in the sections that give them; its values are the defaults of our own.
SECTIONS = {
    "source_tokens_per_update": "5.1",
    "target_tokens_per_update": "5.1",
    "adam_beta1": "5.3",
    "adam_beta2": "5.3",
    "adam_epsilon": "5.3",
    "weight_decay": "5.3",
    "max_grad_norm": "5.3",
    "lr_scheduler_type": "5.3",
    "warmup_steps": "5.3",
}
# Of no account for what a model is, or a matter of its vocabulary.
NOT_COMPARED = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache"}


# The paper


def nearest_row(config: VaswaniConfig) -> str:
    """The paper's model that the width is nearer to: base or big."""
    return "base" if config.d_model <= VaswaniConfig.from_table3("base").d_model else "big"


def config_differences(config: VaswaniConfig, other: VaswaniConfig) -> list[tuple[str, object, object]]:
    """Field, value and other value, of what makes two models differ."""
    ours, theirs = model_fields(config), model_fields(other)
    skipped = NOT_COMPARED | ({"max_position_embeddings"} if config.position_embedding == "sinusoidal" else set())
    return [(name, ours[name], theirs[name]) for name in ours if name not in skipped and ours[name] != theirs[name]]


def deviations(run: Run, config: VaswaniConfig, search: GenerationConfig) -> list[tuple[str, str, str, str]]:
    """What differs from the paper's model of the nearest size: what, here, in the paper, and the section there."""
    values, row = run.values, nearest_row(config)
    target = values.get("target_lang")
    paper = VaswaniConfig.from_table3(row, **(FRENCH_BIG if (row, target) == ("big", "fr") else {}))
    found = [(name, here, there, f"Table 3, {row}") for name, here, there in config_differences(config, paper)]
    if config.vocab_size != VOCABULARY.get(target, VOCABULARY["de"]):
        found.append(("vocabulary", config.vocab_size, VOCABULARY.get(target, VOCABULARY["de"]), "5.1"))
    if values and "wmt14" not in str(values.get("dataset_name")).lower():
        found.append(("training data", "see above", "WMT14", "5.1"))
    usual = defaults()
    for name, section in SECTIONS.items():
        if name in values and values[name] != usual[name]:
            found.append((name, values[name], usual[name], section))
    found += _rate(values, config)
    updates = run.state["global_step"] if run.state else values.get("max_steps")
    if updates is not None and updates != UPDATES[row]:
        found.append(("updates", int(updates), UPDATES[row], "5.2"))
    found += _averaging(run, row)
    for name, there in GENERATION.items():
        if (here := getattr(search, name, None)) != there:
            found.append((name, here, there, "6.1"))
    return [(name, _shown(here), _shown(there), section) for name, here, there, section in found]


def _rate(values: dict, config: VaswaniConfig) -> list[tuple[str, float, float, str]]:
    here, warmup = values.get("learning_rate"), values.get("warmup_steps")
    if here is None or not warmup or warmup < 1:
        return []
    there = paper_learning_rate(config.d_model, warmup)
    return (
        []
        if math.isclose(here, there, rel_tol=1e-3)
        else [("learning_rate (peak, by warmup_steps and d_model)", here, there, "5.3")]
    )


def _averaging(run: Run, row: str) -> list[tuple[str, str, str, str]]:
    count, there = len(averaged_checkpoints(run.averaged)), AVERAGED[row]
    if count == there:
        return []
    here = f"the last {count}" if count else "an exponential moving average" if run.averaged else "none"
    if run.averaged and set(run.averaged) - {"method", "checkpoints"} and count:
        here = f"the best {count}"
    return [("averaged checkpoints", here, f"the last {there}", "6.1")]


def _shown(value) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"
