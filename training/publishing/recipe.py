"""The recipe of a recorded run, as YAML."""

import math

import yaml

from hf_vaswani import VaswaniConfig

from ..paper import paper_learning_rate
from ..trainer.arguments import defaults
from .deviations import config_differences, nearest_row
from .records import Run, without_paths


# Fields that depend on the machine or the checkpoint, not on the author's choices.
NOT_IN_A_RECIPE = {
    *("output_dir", "accelerator_config", "report_to", "do_eval", "dataloader_pin_memory", "greater_is_better"),
    *("use_cpu", "disable_tqdm", "push_to_hub", "logging_dir", "run_name", "resume", "model", "model_overrides"),
}


def recorded_recipe(run: Run, config: VaswaniConfig) -> str | None:
    """Recipe that reproduces a recorded run: YAML of the fields that differ from their defaults."""
    if run.record is None:
        return None
    values, default_values = without_paths(run.values), defaults()
    if values.get("init_from"):  # checksums of the weights
        values["init_from"] = values.get("name of init_from")
    derived = NOT_IN_A_RECIPE | {"num_train_epochs"} if values["max_steps"] > 0 else NOT_IN_A_RECIPE | {"max_steps"}
    if values.get("tokens_per_device"):
        derived = derived | {"gradient_accumulation_steps"}
    if math.isclose(values["learning_rate"], paper_learning_rate(config.d_model, values["warmup_steps"] or 1)):
        derived = derived | {"learning_rate"}
    row = nearest_row(config)
    overrides = {name: value for name, value, _ in config_differences(config, VaswaniConfig.from_table3(row))}
    recipe = {
        name: _integral(values[name])
        for name in default_values
        if name in values and values[name] != default_values[name] and (values[name] or default_values[name])
    }
    recipe = {n: v for n, v in recipe.items() if n not in derived and not n.startswith("hub_") and v is not None}
    recipe |= {"model": row, **({"model_overrides": overrides} if overrides else {})}
    return yaml.safe_dump(recipe, sort_keys=True, allow_unicode=True, default_flow_style=None, width=110).strip()


def _integral(value):
    return int(value) if isinstance(value, float) and value.is_integer() else value
