"""Records of the run behind a checkpoint; missing values are reported as missing."""

import logging
import reprlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Required, TypedDict

from hf_vaswani import VaswaniConfig
from hf_vaswani.checksums_vaswani import checksum

from ..data.pairs import load_pairs
from ..data.treebanks import TreeOptions
from ..evaluation.report import finite
from ..inference.origin import Origin, read_origin
from ..json_records import check_fields, read_record
from ..trainer.arguments import defaults
from ..trainer.averaging import RECORD, AverageFile
from ..trainer.checkpoints import STATE_NAME, checkpoint_folders, read_state
from ..trainer.command_line import load_recipe
from ..trainer.manifest import model_fields, read_manifest
from ..trainer.packaged_recipes import RECIPES
from ..trainer.resumable_trainer import MANIFEST_NAME
from .tensorboard_log import event_files


logger = logging.getLogger(__name__)


class RunValues(TypedDict, total=False):
    """Fields of the recipe in `run.json`, as far as a card shows them."""

    source_lang: Required[str]
    target_lang: Required[str]
    max_steps: Required[int | float]
    learning_rate: Required[int | float]
    devices: Required[int]
    train_files: list[str] | None
    eval_files: list[str] | None
    dataset_name: str | None
    dataset_config: str | None
    hardware: dict | None
    pairs: int | None
    converted_from: dict | None


class Files(TypedDict):
    """Paths of files."""

    files: list[str]


class DataFile(TypedDict):
    """Fingerprint of a training file."""

    size: int
    sha256: str


class Step(TypedDict):
    """Fields of the Trainer's state that a card requires."""

    global_step: int
    epoch: int | float | None
    log_history: list[dict[str, Any]]


@dataclass
class Run:
    """Records in the folders of a checkpoint and of its run.

    Attributes:
        state (`dict`, *optional*): `trainer_state.json` after the last update of the weights.
        record (`dict`, *optional*): `run.json`.
        averaged (`dict`, *optional*): `averaged_from.json`.
        recipe (`str`, *optional*): Text of the publisher's recipe.
        named (`dict`, *optional*): Fields of the publisher's recipe.
        events (`list[Path]`): TensorBoard event files.
        converted (`Origin`, *optional*): `converted_from.json`.
    """

    state: dict | None = None
    record: dict | None = None
    averaged: dict | None = None
    recipe: str | None = None
    named: dict | None = None
    events: list[Path] = field(default_factory=list)
    converted: Origin | None = None

    @property
    def origin(self) -> Origin | None:
        """Conversion of the checkpoint, or of the model that the run started from."""
        return self.converted or self.values.get("converted_from")

    @property
    def is_converted(self) -> bool:
        """True for the weights of a conversion as they are, without training."""
        return self.converted is not None and self.record is None

    @property
    def values(self) -> dict:
        """Recorded fields of the recipe; without a record, the publisher's recipe merged into the defaults."""
        if self.record is not None:
            return {**self.record["must_match"], **self.record["may_change"]}
        if self.named is None:
            return {}
        return {**defaults(), **{name: _number(value) for name, value in self.named.items()}}


def find_run(checkpoint: Path, config: VaswaniConfig, run: str | None = None, recipe: str | None = None) -> Run:
    """Find the records of a checkpoint in its folder, in its run's folder and in the checkpoints of its average.

    Args:
        checkpoint (`Path`): Folder of the weights.
        config (`VaswaniConfig`): Configuration of the model.
        run (`str`, *optional*): Folder of the run; the checkpoint folder or its parent when not given.
        recipe (`str`, *optional*): Path or name of a recipe.

    Raises:
        FileNotFoundError: No such run or recipe.
        ValueError: The run trained another model, or a record or the recipe is malformed.
    """
    if run is not None and not Path(run).is_dir():
        raise FileNotFoundError(f"--run {run}: no such folder.")
    folder = Path(run) if run else checkpoint if checkpoint_folders(checkpoint) else checkpoint.parent
    averaged = _read(checkpoint / RECORD, AverageFile)
    sources = [
        Path(name) if Path(name).is_dir() else folder / Path(name).name for name in averaged_checkpoints(averaged)
    ]
    converted = read_origin(checkpoint)
    candidates = [checkpoint, *reversed(sources), folder, *reversed(checkpoint_folders(folder))]
    if converted is not None and run is None:  # no run made the weights, whatever lies beside them
        candidates = [checkpoint]
    record = next((manifest for path in candidates if (manifest := _read_run(path / MANIFEST_NAME))), None)
    if record is not None and (other := _other_model(record, config)):
        if run is not None:
            raise ValueError(f"--run {run}: another model was trained there, with {other}.")
        logger.warning("%s trained another model than %s (%s): its records are not used.", folder, checkpoint, other)
        record, candidates = None, [checkpoint]
    state = _state([folder if folder in candidates else checkpoint, *candidates], _step(checkpoint, averaged))
    is_run = run is not None or checkpoint_folders(folder) or _read_state(folder)  # not just any parent folder
    events = event_files(folder) if is_run and folder in candidates and state is not None else []
    text, named = (None, None) if recipe is None else (_recipe_text(recipe), load_recipe(recipe))
    return Run(state, record, averaged, text, named, events, converted)


def first_source(run: Run) -> str | None:
    """First source sentence of the run's evaluation files; `None` if they were moved or changed."""
    values = run.values
    files = values.get("places of eval_files", [])
    recorded = [values.get(f"eval_files[{position}]") for position in range(len(files))]
    if not files or not all(Path(file).is_file() for file in files) or recorded != [checksum(Path(f)) for f in files]:
        return None
    trees = TreeOptions(strip=bool(values.get("strip_trees")))
    pairs = load_pairs(files, values["source_lang"], values["target_lang"], True, streaming=True, trees=trees)
    return next((pair["source"] for pair in pairs if pair["source"].strip()), None)


def _finite(record: dict, path: Path) -> dict:
    """Replace numbers that are not finite by null.

    Raises:
        ValueError: The record is nested too deep.
    """
    try:
        return finite(record)
    except RecursionError as error:
        raise ValueError(f"{path}: expected values that are nested less deep.") from error


def _read(path: Path, schema: type[dict] | None = None) -> dict | None:
    """A record with `None` for numbers that are not finite; `None` if there is no such file."""
    return _finite(read_record(path, schema), path) if path.is_file() else None


def _read_state(folder: Path) -> dict | None:
    """The Trainer's state with all fields of `Step`; `None` if there is no such file."""
    if not (folder / STATE_NAME).is_file():
        return None
    state = _finite(read_state(folder), folder / STATE_NAME)
    check_fields(state, Step, str(folder / STATE_NAME))
    return state


def _read_run(path: Path) -> dict | None:
    """`run.json` with its fields and numbers checked; `None` if there is no such file."""
    if not path.is_file():
        return None
    record = _finite(read_manifest(path), path)
    values = {**record["must_match"], **record["may_change"]}
    check_fields(values, RunValues, str(path))
    check_fields({"files": values.get("places of eval_files", [])}, Files, f"{path}: places of eval_files")
    if (origin := values.get("converted_from")) is not None:
        check_fields(origin, Origin, f"{path}: converted_from")
    for name in values:
        if name.startswith("train_files["):
            if not isinstance(values[name], dict):
                raise ValueError(f"{path}: {name}: expected an object, found {reprlib.repr(values[name])}.")
            check_fields(values[name], DataFile, f"{path}: {name}")
    numbers = {name for name, value in defaults().items() if type(value) in (int, float)} | {"learning_rate"}
    for values in (record["must_match"], record["may_change"]):
        for name in numbers & values.keys():
            if values[name] is not None and not isinstance(values[name], (int, float)):
                raise ValueError(f"{path}: {name}: expected a number, found {reprlib.repr(values[name]):.60}.")
    return record


def averaged_checkpoints(averaged: dict | None) -> list[str]:
    return (averaged or {}).get("checkpoints", [])


def _step(checkpoint: Path, averaged: dict | None) -> int | None:
    """Step of the last update in the weights; `None` if unknown."""
    state = _read_state(checkpoint)
    if state is not None:
        return state["global_step"]
    if averaged is not None and "updates" in averaged:
        return averaged["updates"]
    steps = [Path(name).name.removeprefix("checkpoint-") for name in averaged_checkpoints(averaged)]
    return max(map(int, steps)) if steps and all(step.isdigit() for step in steps) else None


def _state(folders: list[Path], step: int | None) -> dict | None:
    """The first state of that step. The run's folder comes first: only its state has the training time."""
    states = (_read_state(folder) for folder in folders if step is not None)
    return next((state for state in states if state is not None and state["global_step"] == step), None)


def _other_model(record: dict, config: VaswaniConfig) -> str:
    own = {f"model.{name}": value for name, value in model_fields(config).items() if name != "use_cache"}
    names = [name for name, value in own.items() if record["must_match"].get(name, value) != value]
    return ", ".join(
        f"{name.removeprefix('model.')} {record['must_match'][name]} instead of {own[name]}" for name in names
    )


def _recipe_text(name: str) -> str:
    load_recipe(name)  # raises if it is not a recipe
    path = Path(name) if Path(name).is_file() else RECIPES / f"{name}.yaml"
    return path.read_text(encoding="utf-8").strip()


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def without_paths(value):
    """Cut absolute paths in a JSON value to their last part, for privacy."""
    if isinstance(value, dict):
        return {name: without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    for kind in (PurePosixPath, PureWindowsPath):
        if isinstance(value, str) and kind(value).is_absolute():
            return kind(value).name
    return value
