"""Checks of a checkpoint's files, before and after a library reads them. Every error names the file."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_vaswani import VaswaniConfig
from hf_vaswani.checksums_vaswani import weight_files
from hf_vaswani.generation_vaswani import LENGTH_PENALTY_FORMS

from ..data.two_sided_tokenizer import TARGET_TOKENIZER


CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TOKENIZER_FILES = (TOKENIZER, TARGET_TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
ADAPTER = "adapter_config.json"
TRUST = "--trust-remote-code"

BYTES_PER_WEIGHT = 4  # float32
BYTES_PER_LAYER = 50_000  # Python objects of a layer, beside its weights; measured
# A model with more parameters than both limits is not built only to find out which of its weights are missing.
MAX_SMALL_PARAMETERS = 10_000_000
MAX_SURPLUS_RATIO = 10  # of the parameters of the model to the stored ones
MAX_NAMES = 3  # in a message
MAX_CHARACTERS = 400  # of a library's message
STEP = re.compile(r"checkpoint-(\d+)")  # a run's checkpoint after so many updates
SELF_EXPLAINING = (ValueError, OSError, SafetensorError, StrictDataclassError)


@contextlib.contextmanager
def one_line_errors(place: str | Path, foreign_code: bool = True) -> Iterator[None]:
    """Context that turns any exception of a library into a one-line error that names the file.

    All exceptions are caught, because malformed files make `transformers` raise TypeError, KeyError, AttributeError
    and others. The message includes the type of an exception that its text alone would not explain.

    Args:
        place (`str` or `Path`): File or checkpoint to name.
        foreign_code (`bool`): Suggest `--trust-remote-code` if foreign code was refused.

    Raises:
        OSError: The library raised an OSError.
        ValueError: The library raised anything else, or refused foreign code.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if foreign_code and "trust_remote_code" in text:
            raise ValueError(refusal(place)) from error
        if not isinstance(error, SELF_EXPLAINING):
            text = f"{type(error).__name__}: {text}"
        if len(text) > MAX_CHARACTERS and type(error) is not ValueError:
            text = f"{text[:MAX_CHARACTERS]}..."
        text = text if str(place) in text else f"{place}: {text}"
        raise (OSError if isinstance(error, OSError) else ValueError)(text) from error


def refusal(place: str | Path) -> str:
    """Message about foreign code that was not run."""
    return (
        f"{place}: this checkpoint needs Python code of its own, which was not run. Read that code before you allow "
        f"it with {TRUST}."
    )


def read_object(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        ValueError: The file does not hold a JSON object, or a field is NaN or infinite. The message names the field.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, found: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {_shown(content)}.")
    if (field := next(_non_finite_fields(content), None)) is not None:
        raise ValueError(f"{path}: {field[0]}: expected a finite number, found {field[1]}.")
    return content


def _non_finite_fields(content: dict | list, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted names and values of fields that are NaN or infinite. The JSON parser limits the recursion."""
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, dict | list):
            yield from _non_finite_fields(value, f"{path}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{path}{name}", value


def _shown(value) -> str:
    """The first 60 characters of a value as JSON, for a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_folder(folder: Path, trust_remote_code: bool = False, ours: bool = False) -> None:
    """Check the files of a checkpoint before anything is built from them. Missing files are skipped, except
    `config.json`.

    Args:
        folder (`Path`): Checkpoint folder.
        trust_remote_code (`bool`): Allow the configuration to name kernels, which are downloaded and run.
        ours (`bool`): Require a model of this project.

    Raises:
        FileNotFoundError: There is no `config.json`.
        ValueError: A file is malformed, a field has an invalid value, or the model exceeds the available memory.
    """
    if (folder / ADAPTER).is_file():
        raise ValueError(f"{folder} holds an adapter, not a model's weights: expected a folder with merged weights.")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: not a checkpoint: there is no {CONFIG}.{_better_folders(folder)}")
    config = read_config(folder / CONFIG, trust_remote_code, ours)
    if (folder / GENERATION).is_file():
        check_generation(folder / GENERATION, config)
    check_tokenizer_files(folder)
    stored = sum(count_stored(path) for path in weight_files(folder).values() if path.suffix == ".safetensors")
    if config is None or not stored:
        return
    if (described := count_parameters(config)) > max(MAX_SURPLUS_RATIO * stored, MAX_SMALL_PARAMETERS):
        raise ValueError(
            f"{folder}: the weights do not fit the model: {CONFIG} describes {described:,} parameters, but only "
            f"{stored:,} are stored."
        )


def checkpoints_below(folder: Path) -> list[Path]:
    """Checkpoint folders one or two levels below a folder: averages first, then other models, such as that of a
    finished run, then the steps of runs, newest first."""
    folders = [path.parent for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in folder.glob(pattern)]

    def rank(checkpoint: Path) -> tuple:
        step = STEP.fullmatch(checkpoint.name)
        kind = 2 if step else 0 if checkpoint.name.startswith("average") else 1
        return kind, -int(step[1]) if step else 0, str(checkpoint)

    return sorted((path for path in folders if any(path.glob("model*.safetensors"))), key=rank)


def _better_folders(folder: Path) -> str:
    """Sentence for a message that names up to three checkpoints below a folder; empty if there are none."""
    found = [str(path) for path in checkpoints_below(folder)]
    return f" Checkpoints below it: {_first_names(found)}." if found else ""


def count_stored(path: Path) -> int:
    """Count the elements of all tensors in a safetensors file, from its header.

    Raises:
        ValueError: The file is malformed.
    """
    with one_line_errors(path), safe_open(path, "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118, not a mapping


def check_tokenizer_files(folder: Path) -> None:
    """Raise ValueError for a malformed tokenizer file. Missing files are skipped."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            read_object(folder / name)
    for path in (folder / TOKENIZER, folder / TARGET_TOKENIZER):
        if path.is_file():
            with one_line_errors(path):
                Tokenizer.from_file(str(path))


def read_config(path: Path, trust_remote_code: bool = False, ours: bool = False) -> VaswaniConfig | None:
    """Read and check a configuration.

    Args:
        path (`Path`): Path of `config.json`.
        trust_remote_code (`bool`): Allow the configuration to name kernels, which are downloaded and run.
        ours (`bool`): Require a model of this project.

    Returns:
        The configuration, or `None` for a foreign model, of which only common fields are checked.

    Raises:
        ValueError: A field has an invalid value, or the model exceeds the available memory.
    """
    content = read_object(path)
    _check_fields(path, content, CONFIG_FIELDS)
    kernels = content.get("attn_implementation") or ""
    if not trust_remote_code and any("/" in str(name) for name in _leaves(kernels)):
        raise ValueError(f"attn_implementation {_shown(kernels)}: {refusal(path)}")
    if (kind := content.get("model_type")) != VaswaniConfig.model_type:
        if ours or kind is None:
            raise ValueError(f"{path}: model_type: expected {VaswaniConfig.model_type!r}, found {kind!r}.")
        return None
    with one_line_errors(path):
        config = VaswaniConfig.from_dict(content)
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < config.vocab_size:
            raise ValueError(f"{path}: {name}: expected the id of one of {config.vocab_size} tokens, found {value}.")
    if config.activation_function not in ACT2FN:
        raise ValueError(
            f"{path}: activation_function: expected an activation of transformers, such as relu, "
            f"found {_shown(config.activation_function)}."
        )
    check_size(config, path)
    return config


def _leaves(value) -> list:
    """Values of nested objects that are not objects themselves."""
    return [leaf for item in value.values() for leaf in _leaves(item)] if isinstance(value, dict) else [value]


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_bool(value) -> bool:
    return isinstance(value, bool)


Rule = tuple[Callable[..., bool], str]
COUNT: Rule = (_is_count, "a whole number of at least 0")
POSITIVE: Rule = (lambda value: _is_count(value, 1), "a whole number of at least 1")
NUMBER: Rule = (_is_number, "a number")
FLOAT_ABOVE_ZERO: Rule = (
    lambda value: isinstance(value, float) and value > 0,
    "a decimal number above 0, such as 1.0",
)
SHARE: Rule = (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1")
BOOL: Rule = (_is_bool, "true or false")
TEXT: Rule = (lambda value: isinstance(value, str), "text")
OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")
IDS: Rule = (
    lambda value: _is_count(value) or (isinstance(value, list) and bool(value) and all(map(_is_count, value))),
    "a token id or a list of token ids",
)
ID_LIST: Rule = (lambda value: isinstance(value, list) and all(map(_is_count, value)), "a list of token ids")

# Common fields of all models' configurations. VaswaniConfig checks its own. Every field may be `null`.
CONFIG_FIELDS: dict[str, Rule] = {
    "model_type": TEXT,
    "auto_map": OBJECT,
    "custom_pipelines": OBJECT,
    "attn_implementation": (lambda value: isinstance(value, str | dict), "text or an object"),
    "architectures": (lambda value: isinstance(value, list), "a list"),
    "dtype": (
        lambda value: isinstance(getattr(torch, str(value), None), torch.dtype),
        "a torch dtype, such as float32",
    ),
}
GENERATION_FIELDS: dict[str, Rule] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_length", "max_new_tokens"), POSITIVE),
    **dict.fromkeys(("min_length", "min_new_tokens", "max_extra_tokens", "top_k"), COUNT),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), COUNT),
    "length_penalty": NUMBER,
    "length_penalty_form": (lambda value: value in LENGTH_PENALTY_FORMS, " or ".join(LENGTH_PENALTY_FORMS)),
    "early_stopping": (lambda value: isinstance(value, bool) or value == "never", 'true, false or "never"'),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), FLOAT_ABOVE_ZERO),
    **dict.fromkeys(("top_p", "typical_p"), SHARE),
    **dict.fromkeys(("do_sample", "use_cache", "fast_decoding", "renormalize_logits", "remove_invalid_values"), BOOL),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), BOOL),
    "return_dict_in_generate": BOOL,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id"), COUNT),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), IDS),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ID_LIST),
}
TOKEN_IDS = [name for name, rule in GENERATION_FIELDS.items() if name.endswith("_token_id")]
HARMLESS = {"transformers_version", "_from_model_config"}  # fields that do not affect the search


def _check_fields(path: Path, content: dict, rules: dict[str, Rule]) -> None:
    """Raise ValueError for a field that violates its rule."""
    for name, (holds, expected) in rules.items():
        value = content.get(name)
        if value is not None and not holds(value):
            raise ValueError(f"{path}: {name}: expected {expected}, found {_shown(value)}.")


def check_generation(path: Path, config: VaswaniConfig | None) -> None:
    """Check search settings.

    Args:
        path (`Path`): Path of `generation_config.json`.
        config (`VaswaniConfig`, *optional*): Configuration of the model. Without it, only types are checked.

    Raises:
        ValueError: A field has an invalid value, or the search exceeds the available memory.
    """
    content = read_object(path)
    _check_fields(path, content, GENERATION_FIELDS)
    if config is None:
        return
    for name in (*TOKEN_IDS, "suppress_tokens", "begin_suppress_tokens"):
        value = content.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token >= config.vocab_size:
                raise ValueError(f"{path}: {name}: expected ids of the {config.vocab_size} tokens, found {token}.")
    check_search(config, content, path)


def unchecked_settings(content: dict) -> list[str]:
    """Names of the search settings that no rule of this module covers."""
    return sorted(n for n, value in content.items() if value is not None and n not in {*GENERATION_FIELDS, *HARMLESS})


def check_search(config: VaswaniConfig, settings: dict, place: str | Path) -> None:
    """Raise ValueError if the keys, values and scores of one sentence exceed the available memory.

    Args:
        config (`VaswaniConfig`): Configuration of the model.
        settings (`dict`): Options of `generate()`.
        place (`str` or `Path`): Origin of the settings, for the message.
    """
    names = ("num_beams", "num_return_sequences", "max_length", "max_new_tokens", "max_extra_tokens", "min_length")
    values = {name: settings.get(name) or 0 for name in names}
    rows = max(1, values.pop("num_beams"), values.pop("num_return_sequences"))
    tokens = max(1, *values.values())
    if config.position_embedding == "learned":
        tokens = min(tokens, config.max_position_embeddings)
    bytes_per_token = BYTES_PER_WEIGHT * config.decoder_layers * config.num_heads * (config.d_k + config.d_v)
    needed = rows * (tokens * (bytes_per_token + 8) + BYTES_PER_WEIGHT * config.vocab_size)
    if needed > (available := psutil.virtual_memory().available):
        causes = ", ".join(f"{name} {settings[name]}" for name in names if settings.get(name))
        raise ValueError(
            f"{place}: {causes}: a sentence would need up to {_gigabytes(needed)} of memory; {_gigabytes(available)} "
            "are available."
        )


def count_parameters(config: VaswaniConfig) -> int:
    """Number of parameters of a model, computed without building it."""
    inner = config.num_heads * (2 * config.d_k + 2 * config.d_v)
    biases = config.num_heads * (2 * config.d_k + config.d_v) + config.d_model
    attention = config.d_model * inner + (biases if config.attention_bias else 0)
    feed_forward = 2 * config.d_model * config.d_ff + config.d_ff + config.d_model
    norm = 2 * config.d_model
    layers = config.encoder_layers * (attention + feed_forward + 2 * norm)
    layers += config.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    matrices = config.vocab_size * (1 if config.tie_word_embeddings else 2) + (config.source_vocab_size or 0)
    positions = 2 * config.max_position_embeddings if config.position_embedding == "learned" else 0
    return layers + config.d_model * (matrices + positions) + (config.vocab_size if config.output_bias else 0)


def check_size(config: VaswaniConfig, place: str | Path) -> None:
    """Raise ValueError if the weights of a model, in float32, exceed the available memory.

    Args:
        config (`VaswaniConfig`): Configuration of the model.
        place (`str` or `Path`): Origin of the configuration, for the message.
    """
    layers, parameters = config.encoder_layers + config.decoder_layers, count_parameters(config)
    needed = BYTES_PER_WEIGHT * parameters + BYTES_PER_LAYER * layers
    if needed > (available := psutil.virtual_memory().available):
        names = ["vocab_size", "d_model", "d_ff", "num_heads", "d_k", "d_v", "encoder_layers", "decoder_layers"]
        names += ["max_position_embeddings"] if config.position_embedding == "learned" else []
        sizes = ", ".join(f"{name} {getattr(config, name)}" for name in names)
        raise ValueError(
            f"{place}: {parameters:,} parameters in {layers:,} layers need {_gigabytes(needed)} of memory; "
            f"{_gigabytes(available)} are available ({sizes})."
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def check_fit(place: str | Path, report: dict) -> None:
    """Raise ValueError if the weights do not match the configuration.

    Args:
        place (`str` or `Path`): Checkpoint to name.
        report (`dict`): Missing, unexpected and mismatched keys, as reported by
            `from_pretrained(output_loading_info=True)`.
    """
    problems = [
        f"{kind.removesuffix('_keys')}: {_first_names(sorted(map(_describe_key, keys)))}"
        for kind, keys in report.items()
        if keys
    ]
    if problems:
        raise ValueError(f"{place}: the weights do not fit the model that {CONFIG} describes. {'; '.join(problems)}.")


def _describe_key(key: str | tuple) -> str:
    """Name of a weight, followed by the shapes for a mismatch `(name, shape found, shape expected)`."""
    return key if isinstance(key, str) else f"{key[0]} {list(key[1])}, expected {list(key[2])}"


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"


def check_finite(place: str | Path, model: PreTrainedModel) -> None:
    """Raise ValueError if a weight has a NaN or infinite element. The message names the weight."""
    if broken := [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]:
        raise ValueError(f"{place}: weights are not finite: {_first_names(broken)}.")
