"""Parser of recipes and of the command line of `hf-vaswani train`.

A recipe is a flat YAML file whose keys are the fields of `fields` and those that transformers adds. `--config` names
it, by path or as one of the recipes in the package. Every field is also a command-line option, which takes precedence.
transformers is imported only where one of its fields is named.
"""

import argparse
import contextlib
import json
import os
import re
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import yaml

from ..data.readers import check_file
from ..options import OptionGroup, Parser, suggestion, truth
from .fields import OWN_GROUPS, DataArguments, ModelArguments
from .packaged_recipes import RECIPES, packaged_recipes


MAX_RECIPE = 2**20  # bytes
METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


class UsageError(ValueError):
    """A mistake on the command line."""


class ShowAll(argparse.Action):
    """`--help-all`: help with the fields that transformers adds."""

    def __call__(self, parser, *_) -> NoReturn:
        parser.add_inherited()
        parser.print_help()
        parser.exit()


class TrainParser(Parser):
    """Parser of the fields of recipes. Errors are raised as `UsageError`.

    Attributes:
        types (`dict`): Types of the fields, by name.
        has_inherited (`bool`): The fields of transformers are among them.
    """

    separator = "_"

    def __init__(self):
        super().__init__(
            prog="hf-vaswani train",
            usage="%(prog)s [--config RECIPE] [--FIELD VALUE ...]",
            description="Train a model. Every option but --config is a field of a recipe, a flat YAML file, and takes "
            "precedence over it.",
            argument_default=argparse.SUPPRESS,
        )
        self.add_argument(
            "--config", default=None, help="recipe: a YAML file, or one of " + ", ".join(packaged_recipes())
        )
        self.add_argument(
            "--help-all", nargs=0, action=ShowAll, help="show the fields of transformers as well, and exit"
        )
        self.types: dict[str, Any] = {}
        self.has_inherited = False
        for title, group in zip(("model", "data", "training"), OWN_GROUPS):
            add_fields(self.add_argument_group(title, group.__doc__), group)
            self.types |= get_type_hints(group)

    def add_inherited(self) -> None:
        """Add the fields of transformers."""
        from .inherited import add_inherited, inherited_types

        if not self.has_inherited:
            add_inherited(self.add_argument_group("training, by transformers"), self.types)
            self.types |= inherited_types(self.types)
            self.has_inherited = True

    def check_names(self, names: list[str]) -> None:
        if not set(names) <= set(self.options):
            self.add_inherited()
        super().check_names(names)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_fields(container: OptionGroup, group: type) -> None:
    """Add an option for each field of a dataclass. Values that are not given are left to the dataclass."""
    types = get_type_hints(group)
    for item in fields(group):
        kind, options = types[item.name], {}
        if get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif "list" in str(kind):
            options |= {"nargs": "+", "metavar": METAVARS[str]}
        else:
            scalar = next(scalar for scalar in METAVARS if scalar in (kind, *get_args(kind)))
            options |= {"type": truth if scalar is bool else scalar, "metavar": METAVARS[scalar]}
            options |= {"nargs": "?", "const": True} if scalar is bool else {}
        text = with_default(item.metadata["help"], None if item.default is MISSING else item.default)
        container.add_argument(f"--{item.name}", *item.metadata.get("aliases", ()), **options, help=text)
        if item.default is True:
            container.add_argument(f"--no_{item.name}", action="store_false", dest=item.name, help=argparse.SUPPRESS)


def with_default(text: str, default) -> str:
    """The help text of a field, followed by its default value unless that is empty.

    >>> with_default("Stream the pairs.", False)
    'Stream the pairs. (default: false)'
    """
    if default in (None, "", [], {}):
        return text
    shown = default.value if isinstance(default, Enum) else default
    return f"{text} (default: {str(shown).lower() if isinstance(shown, bool) else shown})"


class Values(NamedTuple):
    """Parsed recipe and command line.

    Attributes:
        model (`ModelArguments`), data (`DataArguments`): Arguments of these groups.
        training (`dict`): Values of the training arguments that were given.
        config (`str`, *optional*): Recipe.
    """

    model: ModelArguments
    data: DataArguments
    training: dict
    config: str | None


def parse_values(argv: list[str] | None = None) -> Values:
    """Parse a recipe and the command line.

    Args:
        argv (`list[str]`, *optional*): Command-line arguments; `sys.argv[1:]` when not given.

    Raises:
        UsageError: Unknown option or invalid value on the command line.
        ValueError: Unknown field or invalid value in the recipe, or values that conflict.
        FileNotFoundError: No such recipe.
    """
    parser = TrainParser()
    config = parser.parse_args(argv).config
    words = []
    if config is not None:
        recipe = load_recipe(config, parser)
        words = _recipe_argv(recipe)
        try:
            parser.parse_args(words)
        except UsageError as error:
            raise ValueError(f"{config}: {short(error)}") from error
        parser.set_defaults(**{name: None for name, value in recipe.items() if value in ("null", "~")})
    given = vars(parser.parse_args([*words, *(sys.argv[1:] if argv is None else argv)]))
    with naming_recipe(config):
        model, data = (
            group(**{item.name: given.pop(item.name) for item in fields(group) if item.name in given})
            for group in (ModelArguments, DataArguments)
        )
        if isinstance(model.model_overrides, str):
            overrides = _read_yaml(model.model_overrides, f"model_overrides {model.model_overrides!r:.200}")
            model.model_overrides = {name: _override(name, value) for name, value in overrides.items()}
    data.train_files = [expand(path) for path in data.train_files or []]
    data.eval_files = [expand(path) for path in data.eval_files or []]
    for name in ("init_from", "tokenizer_from"):
        if getattr(model, name) is not None:
            setattr(model, name, expand(getattr(model, name)))
    training = {name: value for name, value in given.items() if name not in ("config", "verbose")}
    return Values(model, data, training, config)


@contextlib.contextmanager
def naming_recipe(config: str | None) -> Iterator[None]:
    """Context that shortens the message of a ValueError to one line and adds the name of the recipe."""
    try:
        yield
    except ValueError as error:
        raise ValueError(short(error) + ("" if config is None else f" (recipe: {config})")) from error


def load_recipe(name: str, parser: TrainParser | None = None) -> dict:
    """Read a recipe as a mapping from fields to text, lists of text, or mappings.

    Args:
        name (`str`): Path of a YAML file, or name of a packaged recipe.
        parser (`TrainParser`, *optional*): Parser of the command line, which may get the fields of transformers.

    Raises:
        FileNotFoundError: Neither a file nor a packaged recipe.
        ValueError: Not a YAML mapping, or an unknown field.
    """
    path = Path(name)
    if name in packaged_recipes() and not path.is_file():
        path = RECIPES / f"{name}.yaml"
    else:
        _check_recipe_file(name)
    try:
        recipe = _read_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path}: not YAML: byte 0x{byte:02x} at position {error.start} is not UTF-8.") from error
    parser = parser or TrainParser()
    if not recipe.keys() <= parser.types.keys():
        parser.add_inherited()
    for key, value in recipe.items():
        if key not in parser.types:
            raise ValueError(f"{path}: unknown field {key!r:.60}.{suggestion(str(key), parser.types)}")
        _check_kind(str(parser.types[key]), value, f"{path}: {key}")
    return recipe


def _check_recipe_file(name: str) -> None:
    """Raise OSError for a missing file, and ValueError for one that is too large."""
    try:
        check_file(name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"--config {name}: no such file, and no recipe of that name. Recipes: {', '.join(packaged_recipes())}."
        ) from None
    if (size := Path(name).stat().st_size) > MAX_RECIPE:
        raise ValueError(f"{name}: {size:,} bytes; a recipe has at most {MAX_RECIPE:,}.")


def _check_kind(kind: str, value, place: str) -> None:
    """Raise ValueError for a list or mapping that the field's type does not allow, and for nested values in a list."""
    if isinstance(value, list):
        if "list" not in kind:
            raise ValueError(f"{place}: expected one value, found a list of {len(value)}.")
        for item in value:
            if not isinstance(item, str) or item.startswith("-"):
                raise ValueError(f"{place}: expected a list of names, found {reprlib.repr(item)} in it.")
    elif isinstance(value, dict) and not ("dict" in kind or place.endswith(": model_overrides")):
        raise ValueError(f"{place}: expected a value, found a mapping.")


class _Loader(yaml.BaseLoader):
    """YAML loader that refuses aliases, which can expand a few lines beyond any memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def _read_yaml(text: str, place: str) -> dict:
    """Read a YAML mapping with its scalars as text; the fields' types interpret them (`no` may be Norwegian)."""
    try:
        mapping = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(mapping, dict):
        raise ValueError(f"{place}: expected 'field: value' lines, found {type(mapping).__name__}.")
    return mapping


def _typed(text: str):
    """Parse a scalar as a number, truth value or text by YAML 1.2, in which 5e-3 is a number.

    Raises:
        ValueError: A list, a mapping, an invalid date, or a number of too many digits.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected one value, found {reprlib.repr(text)}")
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected a number, a truth value or text, found {text!r:.60}") from error


def _recipe_argv(recipe: dict) -> list[str]:
    """Command-line arguments equivalent to a recipe, for a single parser of both."""
    argv = []
    for name, value in recipe.items():
        if isinstance(value, list):
            argv += [f"--{name}", *value]
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps(value)}")
        elif value not in ("", "null", "~"):
            argv.append(f"--{name}={value}")
    return argv


def expand(path: str) -> str:
    """Expand environment variables and `~` in a path.

    Raises:
        ValueError: A variable is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise ValueError(f"{path}: the environment variable {unset[1]} is not set.")
    return expanded


def _override(name: str, value):
    try:
        return _typed(value)
    except ValueError as error:
        raise ValueError(f"model_overrides, {name:.60}: {short(error)}.") from error


def short(error: Exception) -> str:
    """The message on one line, cut to 500 characters."""
    return f"{' '.join(str(error).split()):.500}"
