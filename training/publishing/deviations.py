"""Differences of a run from the paper's model of the nearest size."""

import math

from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig

from ..paper import AVERAGED, FRENCH_BIG, GENERATION, UPDATES, VOCABULARY, paper_learning_rate
from ..trainer.arguments import defaults
from ..trainer.manifest import model_fields
from .records import Run, averaged_checkpoints


# Training arguments that the paper specifies, and the section of each. The paper's values are our defaults.
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
# Fields that describe the vocabulary or the cache, not the architecture.
NOT_COMPARED = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache"}


# The paper


def nearest_row(config: VaswaniConfig) -> str:
    """Row of Table 3, base or big, with the nearest `d_model`."""
    return "base" if config.d_model <= VaswaniConfig.from_table3("base").d_model else "big"


def config_differences(config: VaswaniConfig, other: VaswaniConfig) -> list[tuple[str, object, object]]:
    """Architectural differences of two models, as `(field, value, other value)`."""
    ours, theirs = model_fields(config), model_fields(other)
    skipped = NOT_COMPARED | ({"max_position_embeddings"} if config.position_embedding == "sinusoidal" else set())
    return [(name, ours[name], theirs[name]) for name in ours if name not in skipped and ours[name] != theirs[name]]


def deviations(run: Run, config: VaswaniConfig, search: GenerationConfig) -> list[tuple[str, str, str, str]]:
    """Deviations from the paper's model of the nearest size, as `(name, our value, paper's value, section)`."""
    values, row = run.values, nearest_row(config)
    target = values.get("target_lang")
    paper = VaswaniConfig.from_table3(row, **(FRENCH_BIG if (row, target) == ("big", "fr") else {}))
    differences = [(name, own, papers, f"Table 3, {row}") for name, own, papers in config_differences(config, paper)]
    if config.vocab_size != VOCABULARY.get(target, VOCABULARY["de"]):
        differences.append(("vocabulary", config.vocab_size, VOCABULARY.get(target, VOCABULARY["de"]), "5.1"))
    if values and "wmt14" not in str(values.get("dataset_name")).lower():
        differences.append(("training data", "see above", "WMT14", "5.1"))
    default_values = defaults()
    for name, section in SECTIONS.items():
        if name in values and values[name] != default_values[name]:
            differences.append((name, values[name], default_values[name], section))
    differences += _learning_rate_difference(values, config)
    updates = run.state["global_step"] if run.state else values.get("max_steps")
    if updates is not None and updates != UPDATES[row]:
        differences.append(("updates", int(updates), UPDATES[row], "5.2"))
    differences += [] if run.is_converted else _averaging_difference(run, row)
    for name, papers in GENERATION.items():
        if (own := getattr(search, name, None)) != papers:
            differences.append((name, own, papers, "6.1"))
    return [(name, _formatted(own), _formatted(papers), section) for name, own, papers, section in differences]


def _learning_rate_difference(values: dict, config: VaswaniConfig) -> list[tuple[str, float, float, str]]:
    own, warmup = values.get("learning_rate"), values.get("warmup_steps")
    if own is None or not warmup or warmup < 1:
        return []
    papers = paper_learning_rate(config.d_model, warmup)
    if math.isclose(own, papers, rel_tol=1e-3):
        return []
    return [("learning_rate (peak, by warmup_steps and d_model)", own, papers, "5.3")]


def _averaging_difference(run: Run, row: str) -> list[tuple[str, str, str, str]]:
    count, papers = len(averaged_checkpoints(run.averaged)), AVERAGED[row]
    if count == papers:
        return []
    own = f"the last {count}" if count else "an exponential moving average" if run.averaged else "none"
    if run.averaged and set(run.averaged) - {"method", "checkpoints"} and count:
        own = f"the best {count}"
    return [("averaged checkpoints", own, f"the last {papers}", "6.1")]


def _formatted(value) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"
