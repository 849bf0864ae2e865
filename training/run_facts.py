"""What the run behind a checkpoint recorded, and what follows from it: its recipe, its cost, how it differs from the
paper. What was not recorded is said to be so, what is estimated is called an estimate."""

import json
import logging
import math
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from itertools import pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath

import yaml
from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig
from hf_vaswani.checksums_vaswani import checksum

from .arguments import GROUPS, load_recipe
from .average import RECORD
from .checkpoints import STATE_NAME, checkpoint_folders
from .data import load_pairs
from .event_files import event_files
from .run_record import model_fields
from .safe_trainer import RECORD_NAME
from .train import GENERATION
from .trainer import paper_learning_rate


logger = logging.getLogger(__name__)

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
UPDATES = {"base": 100_000, "big": 300_000}  # section 5.2
AVERAGED = {"base": 5, "big": 20}  # section 6.1
VOCABULARY = {"de": 37_000, "fr": 32_000}  # section 5.1
FRENCH_BIG = {"dropout": 0.1}  # section 6.1
# Of no account for what a model is, or a matter of its vocabulary.
NOT_COMPARED = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache"}
# Where the run's own machine, not its author, says what the value is.
NOT_IN_A_RECIPE = {
    *("output_dir", "accelerator_config", "report_to", "do_eval", "dataloader_pin_memory", "greater_is_better"),
    *("use_cpu", "disable_tqdm", "push_to_hub", "logging_dir", "run_name", "resume", "model", "model_overrides"),
}


@dataclass
class Run:
    """What a checkpoint and its run's folder hold.

    Attributes:
        state (`dict`, *optional*): `trainer_state.json` as it was after the last update of the weights.
        record (`dict`, *optional*): `run.json`.
        averaged (`dict`, *optional*): `averaged_from.json`.
        recipe (`str`, *optional*): Text of the recipe that the publisher names; `named` holds its fields.
        events (`list[Path]`): TensorBoard's files.
    """

    state: dict | None = None
    record: dict | None = None
    averaged: dict | None = None
    recipe: str | None = None
    named: dict | None = None
    events: list[Path] = field(default_factory=list)

    @property
    def values(self) -> dict:
        """Fields of the recipe, as recorded, or else as the named recipe has them, over the defaults."""
        if self.record is not None:
            return {**self.record["same"], **self.record["noted"]}
        if self.named is None:
            return {}
        return {**defaults(), **{name: _number(value) for name, value in self.named.items()}}


def find_run(checkpoint: Path, config: VaswaniConfig, run: str | None = None, recipe: str | None = None) -> Run:
    """Look for the records of a checkpoint in its folder, in its run's, and in those that it was averaged from.

    Args:
        checkpoint (`Path`): Folder of the weights.
        config (`VaswaniConfig`): Of the model.
        run (`str`, *optional*): Folder of the run; the checkpoint's own, or the one that it lies in, when not given.
        recipe (`str`, *optional*): Path or name of a recipe.

    Raises:
        FileNotFoundError: No such run or recipe.
        ValueError: The run trained another model, or the recipe is none.
    """
    if run is not None and not Path(run).is_dir():
        raise FileNotFoundError(f"--run {run}: no such folder.")
    folder = Path(run) if run else checkpoint if checkpoint_folders(checkpoint) else checkpoint.parent
    averaged = _read(checkpoint / RECORD)
    sources = [Path(name) if Path(name).is_dir() else folder / Path(name).name for name in _sources(averaged)]
    places = [checkpoint, *reversed(sources), folder, *reversed(checkpoint_folders(folder))]
    record = next((found for place in places if (found := _read(place / RECORD_NAME))), None)
    if record is not None and (other := _other_model(record, config)):
        if run is not None:
            raise ValueError(f"--run {run}: another model was trained there, with {other}.")
        logger.warning("%s is not of the model in %s (%s): its records are not used.", folder, checkpoint, other)
        record, places = None, [checkpoint]
    state = _state([folder if folder in places else checkpoint, *places], _step(checkpoint, averaged))
    own = run is not None or checkpoint_folders(folder) or _read(folder / STATE_NAME)  # not just any folder above it
    events = event_files(folder) if own and folder in places and state is not None else []
    text, named = (None, None) if recipe is None else (_recipe_text(recipe), load_recipe(recipe))
    return Run(state, record, averaged, text, named, events)


def first_source(run: Run) -> str | None:
    """The first sentence that the run was evaluated on while training, if its file is where it was, and the same."""
    values = run.values
    files = values.get("places of eval_files", [])
    known = [values.get(f"eval_files[{position}]") for position in range(len(files))]
    if not files or not all(Path(file).is_file() for file in files) or known != [checksum(Path(f)) for f in files]:
        return None
    pairs = load_pairs(files, values["source_lang"], values["target_lang"], drop_empty=True, streaming=True)
    return next((pair["source"] for pair in pairs if pair["source"].strip()), None)


def _read(path: Path) -> dict | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _sources(averaged: dict | None) -> list[str]:
    return (averaged or {}).get("checkpoints", [])


def _step(checkpoint: Path, averaged: dict | None) -> int | None:
    """The last update that went into the weights, where that can be known."""
    own = _read(checkpoint / STATE_NAME)
    if own is not None:
        return own["global_step"]
    if averaged is not None and "updates" in averaged:
        return averaged["updates"]
    steps = [Path(name).name.removeprefix("checkpoint-") for name in _sources(averaged)]
    return max(map(int, steps)) if steps and all(step.isdigit() for step in steps) else None


def _state(places: list[Path], step: int | None) -> dict | None:
    """The run's own state is looked at first: beside a checkpoint's, it also has the time that training took."""
    states = (_read(place / STATE_NAME) for place in places if step is not None)
    return next((state for state in states if state is not None and state["global_step"] == step), None)


def _other_model(record: dict, config: VaswaniConfig) -> str:
    own = {f"model.{name}": value for name, value in model_fields(config).items() if name != "use_cache"}
    names = [name for name, value in own.items() if record["same"].get(name, value) != value]
    return ", ".join(f"{name.removeprefix('model.')} {record['same'][name]} instead of {own[name]}" for name in names)


def _recipe_text(name: str) -> str:
    load_recipe(name)  # whether it is one
    path = Path(name) if Path(name).is_file() else resources.files(__package__) / "recipes" / f"{name}.yaml"
    return path.read_text(encoding="utf-8").strip()


def defaults() -> dict:
    """The default of each field of a recipe."""
    every = [field for group in GROUPS for field in fields(group)]
    return {f.name: f.default if f.default is not MISSING else f.default_factory() for f in every if f.init}


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def without_paths(value):
    """The same JSON, with absolute paths cut down to their last part: whose machine it was is nobody's business."""
    if isinstance(value, dict):
        return {name: without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    for kind in (PurePosixPath, PureWindowsPath):
        if isinstance(value, str) and kind(value).is_absolute():
            return kind(value).name
    return value


# The recipe


def recorded_recipe(run: Run, config: VaswaniConfig) -> str | None:
    """The recipe that gives the recorded run again, as YAML of the fields that differ from their defaults."""
    if run.record is None:
        return None
    values, usual = without_paths(run.values), defaults()
    derived = NOT_IN_A_RECIPE | {"num_train_epochs"} if values["max_steps"] > 0 else NOT_IN_A_RECIPE | {"max_steps"}
    if values.get("tokens_per_device"):
        derived = derived | {"gradient_accumulation_steps"}
    if math.isclose(values["learning_rate"], paper_learning_rate(config.d_model, values["warmup_steps"] or 1)):
        derived = derived | {"learning_rate"}
    row = nearest_row(config)
    overrides = {name: here for name, here, _ in _differences(config, VaswaniConfig.from_table3(row))}
    recipe = {
        name: _whole(values[name])
        for name in usual
        if name in values and values[name] != usual[name] and (values[name] or usual[name])
    }
    recipe = {n: v for n, v in recipe.items() if n not in derived and not n.startswith("hub_") and v is not None}
    recipe |= {"model": row, **({"model_overrides": overrides} if overrides else {})}
    return yaml.safe_dump(recipe, sort_keys=True, allow_unicode=True, default_flow_style=None, width=110).strip()


def _whole(value):
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The paper


def nearest_row(config: VaswaniConfig) -> str:
    """The paper's model that the width is nearer to: base or big."""
    return "base" if config.d_model <= VaswaniConfig.from_table3("base").d_model else "big"


def _differences(config: VaswaniConfig, other: VaswaniConfig) -> list[tuple[str, object, object]]:
    """Field, value and other value, of what makes two models differ."""
    ours, theirs = model_fields(config), model_fields(other)
    skipped = NOT_COMPARED | ({"max_position_embeddings"} if config.position_embedding == "sinusoidal" else set())
    return [(name, ours[name], theirs[name]) for name in ours if name not in skipped and ours[name] != theirs[name]]


def deviations(run: Run, config: VaswaniConfig, search: GenerationConfig) -> list[tuple[str, str, str, str]]:
    """What differs from the paper's model of the nearest size: what, here, in the paper, and the section there."""
    values, row = run.values, nearest_row(config)
    target = values.get("target_lang")
    paper = VaswaniConfig.from_table3(row, **(FRENCH_BIG if (row, target) == ("big", "fr") else {}))
    found = [(name, here, there, f"Table 3, {row}") for name, here, there in _differences(config, paper)]
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
    count, there = len(_sources(run.averaged)), AVERAGED[row]
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
    ends = [entry for entry in log if "train_runtime" in entry and entry["step"] == updates]
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
