"""Differences of a run from the paper's model of the nearest size, or from its parser."""

import math
from dataclasses import dataclass

from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig

from ..data.trees import UNKNOWN_TAG
from ..paper import (
    AVERAGED,
    FRENCH_BIG,
    GENERATION,
    PARSER,
    PARSER_GENERATION,
    PARSER_VOCABULARY,
    UPDATES,
    VOCABULARY,
    paper_learning_rate,
)
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


# The paper's parser was tuned in the dropout. 64 values per head, as in the base model, do not add up to its d_model.
NOT_STATED = ("dropout", "attention_dropout", "d_k", "d_v")


# The paper


@dataclass(frozen=True)
class PapersModel:
    """Model of the paper to compare with.

    Attributes:
        name (`str`): Its name in a sentence.
        row (`str`): Row of Table 3 with its number of updates and of averaged checkpoints.
        config (`VaswaniConfig`): Its architecture.
        place (`str`): Where the paper describes the architecture.
        vocabulary (`dict[str, int]`): Its sizes of the vocabulary, by setting; one of them without a name.
        data (`str`): Its training data.
        generation (`dict`): Its search.
        section (`str`): Section of `vocabulary` and `data`.
        section_of_search (`str`): Section of `generation`.
    """

    name: str
    row: str
    config: VaswaniConfig
    place: str
    vocabulary: dict[str, int]
    data: str
    generation: dict
    section: str = "5.1"
    section_of_search: str = "6.1"

    @property
    def is_parser(self) -> bool:
        return self.generation is PARSER_GENERATION


def papers_model(run: Run, config: VaswaniConfig, is_parser: bool = False) -> PapersModel:
    """The paper's parser, or its translation model of the nearest size."""
    if is_parser:
        own = {name: getattr(config, name) for name in NOT_STATED}
        parser = VaswaniConfig.from_table3("base", **PARSER, **own)
        data = "Wall Street Journal, 40,000 sentences; semi-supervised, 17 million more"
        return PapersModel("parser", "base", parser, "6.3", PARSER_VOCABULARY, data, PARSER_GENERATION, "6.3", "6.3")
    row, target = nearest_row(config), run.values.get("target_lang")
    paper = VaswaniConfig.from_table3(row, **(FRENCH_BIG if (row, target) == ("big", "fr") else {}))
    vocabulary = {"": VOCABULARY.get(target, VOCABULARY["de"])}
    return PapersModel(f"{row} model", row, paper, f"Table 3, {row}", vocabulary, "WMT14", GENERATION)


def nearest_row(config: VaswaniConfig) -> str:
    """Row of Table 3, base or big, with the nearest `d_model`."""
    return "base" if config.d_model <= VaswaniConfig.from_table3("base").d_model else "big"


def config_differences(config: VaswaniConfig, other: VaswaniConfig) -> list[tuple[str, object, object]]:
    """Architectural differences of two models, as `(field, value, other value)`."""
    ours, theirs = model_fields(config), model_fields(other)
    skipped = NOT_COMPARED | ({"max_position_embeddings"} if config.position_embedding == "sinusoidal" else set())
    return [(name, ours[name], theirs[name]) for name in ours if name not in skipped and ours[name] != theirs[name]]


def deviations(
    run: Run, config: VaswaniConfig, search: GenerationConfig, paper: PapersModel
) -> list[tuple[str, str, str, str]]:
    """Deviations from a model of the paper, as `(name, our value, paper's value, section)`."""
    values, row = run.values, paper.row
    differences = [(name, own, papers, paper.place) for name, own, papers in config_differences(config, paper.config)]
    if config.vocab_size not in paper.vocabulary.values():
        sizes = " or ".join(f"{size:,} {name}".strip() for name, size in paper.vocabulary.items())
        differences.append(("vocabulary", config.vocab_size, sizes, paper.section))
    if values and "wmt14" not in str(values.get("dataset_name")).lower():
        differences.append(("training data", "see above", paper.data, paper.section))
    if paper.is_parser and values.get("tree_tags", UNKNOWN_TAG) != UNKNOWN_TAG:
        papers_tags = f"not stated; {UNKNOWN_TAG} in Vinyals et al. (2015)"
        differences.append(("tags of words", "predicted", papers_tags, "6.3"))
    default_values = defaults()
    for name, section in SECTIONS.items():
        if name in values and values[name] != default_values[name]:
            differences.append((name, values[name], default_values[name], section))
    differences += [] if paper.is_parser else _learning_rate_difference(values, config)  # not published
    updates = run.state["global_step"] if run.state else values.get("max_steps")
    if updates is not None and updates != UPDATES[row]:
        differences.append(("updates", int(updates), UPDATES[row], "5.2"))
    differences += [] if run.is_converted else _averaging_difference(run, row)
    for name, papers in paper.generation.items():
        if (own := getattr(search, name, None)) != papers:
            differences.append((name, own, papers, paper.section_of_search))
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
