"""Fill in the template `model_card.md` from a run's records, and merge it into an existing card.

Text between `<!-- hf-vaswani: NAME -->` and `<!-- /hf-vaswani: NAME -->` is a generated section. Every update rewrites
the generated sections and the metadata. All other text, headings included, is written once and belongs to the author.
A card without generated sections is never changed.
"""

import hashlib
import json
import logging
import math
import re
import shlex
import tempfile
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from itertools import chain, groupby
from pathlib import Path
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig

from ..data.readers import DataError
from ..data.tokenizer import symbol_ids
from ..data.two_sided_tokenizer import TwoSidedTokenizer
from ..evaluation.metrics import BRACKETING_NAME, MetricScore
from ..evaluation.report import Report, as_text, finite
from ..inference.origin import ORIGIN
from ..inference.parsing import parse
from ..inference.translation import translate
from ..markdown import UNWRITABLE, as_code, as_code_block, as_markdown, as_paragraph, one_line
from ..trainer.averaging import RECORD as AVERAGE_RECORD
from ..trainer.checkpoints import STATE_NAME
from ..trainer.cost import Cost, cost, operations
from ..trainer.resumable_trainer import MANIFEST_NAME
from .curves import draw_curves
from .deviations import PapersModel, deviations, papers_model
from .provenance import conversion_rows, license_of, metadata_of, original_license, original_name, published
from .recipe import recorded_recipe
from .records import Run, without_paths
from .tensorboard_log import scalars


logger = logging.getLogger(__name__)


CURVES = "curves.png"
UNKNOWN_LICENSE = "unknown"
DIRECTION = "translating from"  # in the summary of a card that names source and target
AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoTokenizer")
# The Hub's identifiers of metrics, by the names in our reports.
HUB_METRICS = {
    "sacreBLEU": "sacrebleu",
    "tokenised BLEU": "bleu",
    "compound-split BLEU": "bleu",
    BRACKETING_NAME: "f1",
    "chrF": "chrf",
    "chrF++": "chrf",
    "TER": "ter",
    "COMET": "comet",
    "perplexity per token": "perplexity",
    "perplexity per word": "perplexity",
}
SCORED = ("metrics", "model-index")  # metadata fields that hold scores
MARKER = re.compile(r"<!-- (?P<end>/?)hf-vaswani: (?P<name>\w+) -->")
TEST = re.compile(r"^(?=### )", re.MULTILINE)  # start of the scores on one test set


@dataclass(frozen=True)
class Section:
    """Generated section: its name, its span with both comments, and the text between the comments."""

    name: str
    start: int
    end: int
    text: str


@dataclass
class CardOptions:
    """Facts from the publisher, which no run records.

    Attributes:
        license (`str`, *optional*): Licence, an identifier of the Hub.
        languages (`list[str]`, *optional*): Source and target language.
        datasets (`list[str]`, *optional*): Data sets on the Hub; the run's own data set of the Hub when not given.
        run (`str`, *optional*): Folder of the run, for a checkpoint outside it.
        recipe (`str`, *optional*): Path or name of the recipe, for runs that recorded none.
        hardware (`str`, *optional*): Training hardware.
        watts (`float`, *optional*): Mean power draw in watts.
        example (`str`, *optional*): Sentence to translate in the card.
        reports (`dict[str, Report]`): Scores by the name of the test set.
        score_commands (`dict[str, str]`): Commands that reproduce the scores, by the name of the test set.
        is_parser (`bool`): The model is a parser, of one language. `write_card` sets it.
    """

    license: str | None = None
    languages: list[str] | None = None
    datasets: list[str] | None = None
    run: str | None = None
    recipe: str | None = None
    hardware: str | None = None
    watts: float | None = None
    example: str | None = None
    reports: dict[str, Report] = field(default_factory=dict)
    score_commands: dict[str, str] = field(default_factory=dict)
    is_parser: bool = False


def write_card(
    checkpoint: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    repo: str,
    card_options: CardOptions,
    run: Run,
) -> tuple[ModelCard, dict[str, bytes]]:
    """New card and the files published with it: picture of the curves, records without paths, TensorBoard log.

    Args:
        checkpoint (`Path`): Folder of the weights.
        model, tokenizer: Model and tokenizer of that folder.
        repo (`str`): Repository for the loading code in the card, `user/name`.
        card_options (`CardOptions`): Facts from the publisher.
        run (`Run`): Records of the run, from `find_run`.
    """
    picture = _curves(run)
    if is_parser := bool(symbol_ids(tokenizer)):
        card_options = replace(card_options, is_parser=True, languages=(card_options.languages or [])[:1])
    card_options = replace(
        card_options,
        reports=_with_one_line_names(card_options.reports),
        score_commands=_with_one_line_names(card_options.score_commands),
    )
    if card_options.license is None:
        card_options = replace(card_options, license=license_of(run))
    quoted_repo = _quoted(repo)
    card = ModelCard.from_template(
        _metadata(repo, card_options, run),
        template_str=(resources.files(__package__) / "model_card.md").read_text(encoding="utf-8"),
        md=as_markdown,
        paragraph=as_paragraph,
        code=as_code,
        code_block=as_code_block,
        name=repo.split("/")[-1],
        repo=quoted_repo,
        loading=[f"{name}.from_pretrained({quoted_repo}, trust_remote_code=True)" for name in AUTO_CLASSES],
        languages=None if is_parser else card_options.languages,
        is_parser=is_parser,
        parsing=shlex.join(["hf-vaswani", "translate", "--model", one_line(repo), "--format", "tree"]),
        weights=weights_of(checkpoint),
        curves=CURVES if picture else None,
        license=card_options.license or UNKNOWN_LICENSE,
        **_about_model(run, model, tokenizer, card_options),
        **_about_scores(card_options),
        **_about_training(run, model, tokenizer, card_options),
        **_about_origin(run, model),
    )
    records = {STATE_NAME: run.state, MANIFEST_NAME: run.record, AVERAGE_RECORD: run.averaged}
    records[ORIGIN] = published(run.converted) if run.converted else None
    files = {name: _as_json(record) for name, record in records.items() if record is not None}
    events = scalars(run.events, run.state["global_step"]) if run.state else {}
    return card, files | events | ({CURVES: picture} if picture else {})


def _with_one_line_names(by_name: dict) -> dict:
    return {one_line(name) or "unnamed": value for name, value in by_name.items()}


def _quoted(text: str) -> str:
    """Python string literal on one line, with the opening of HTML comments escaped."""
    return json.dumps(UNWRITABLE.sub("\ufffd", text), ensure_ascii=False, allow_nan=False).replace(
        "<!--", "\\u003c!--"
    )


def _as_json(record: dict) -> bytes:
    text = json.dumps(finite(without_paths(record)), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode(errors="replace")


def _about_model(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card_options: CardOptions
) -> dict:
    sentence = card_options.example
    decode = partial(parse, file="the example", skip=True) if card_options.is_parser else translate
    return {
        "config": model.config,
        "parameters": model.num_parameters(),
        "averaged": _averaged(run),
        "search": _search(model.generation_config),
        "quoted_example": _quoted(sentence or "..."),
        "example": (sentence, decode(model, tokenizer, [sentence])[0]) if sentence else None,
    }


def _about_scores(card_options: CardOptions) -> dict:
    return {
        "reports": [
            (test, _table(test, report), card_options.score_commands.get(test))
            for test, report in card_options.reports.items()
        ],
    }


def _about_training(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card_options: CardOptions
) -> dict:
    recipe, recipe_note = _recipe(run, model.config)
    papers = papers_model(run, model.config, card_options.is_parser)
    differences = deviations(run, model.config, model.generation_config, papers)
    return {
        "data": _data(run, tokenizer, model.config),
        "compute": _compute(run, model, card_options),
        "recipe": recipe,
        "recipe_note": recipe_note,
        "deviations": differences,
        "deviations_note": _deviations_note(run, papers, bool(differences)),
    }


def _about_origin(run: Run, model: PreTrainedModel) -> dict:
    if (origin := run.origin) is None:
        return {"original": None, "conversion": []}
    return {
        "original": original_name(origin),
        "is_converted": run.is_converted,
        "conversion": conversion_rows(origin, model.config),
        "original_license": original_license(origin),
    }


def weights_of(checkpoint: Path) -> str:
    """Weight files and their SHA-256, as Markdown."""
    checksums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
    return ", ".join(
        f"{as_code(name)} (SHA-256 {as_code(entry['sha256'])})" for name, entry in sorted(checksums.items())
    )


# Metadata


def _metadata(repo: str, card_options: CardOptions, run: Run) -> ModelCardData:
    values = run.values
    languages = card_options.languages or (run.origin.get("languages") if run.is_converted else None)
    results = [r for test, report in card_options.reports.items() for r in eval_results(test, report)]
    datasets = card_options.datasets or ([values["dataset_name"]] if values.get("dataset_name") else None)
    return ModelCardData(
        language=_lines(languages),
        license=_lines(card_options.license) or UNKNOWN_LICENSE,
        library_name="transformers",
        pipeline_tag=None if card_options.is_parser else "translation",
        tags=["vaswani", "attention-is-all-you-need"],
        datasets=_lines(datasets),
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=one_line(repo.split("/")[-1]) if results else None,
        eval_results=results or None,
        **metadata_of(run, card_options.license),
    )


def _lines(value):
    """Put each text on one line: the YAML writer does not escape every line separator of Unicode."""
    if isinstance(value, list):
        return [_lines(item) for item in value]
    return one_line(value) if isinstance(value, str) else value


def eval_results(test: str, report: Report) -> list[EvalResult]:
    """Finite scores of a report in the Hub's form; the Hub rejects other values.

    Args:
        test (`str`): Name of the test set.
        report (`Report`): Scores on the test set.
    """
    return [
        EvalResult(
            task_type="other" if figure.name == BRACKETING_NAME else "translation",
            task_name="Constituency parsing" if figure.name == BRACKETING_NAME else "Translation",
            dataset_type=_identifier(test),
            dataset_name=test,
            metric_type=HUB_METRICS.get(figure.name.split(" (")[0], one_line(figure.name).lower()),
            metric_name=one_line(figure.name),
            metric_value=round(figure.score, figure.digits),
            metric_args={"signature": _signature(figure)},
        )
        for figure in report.figures
        if math.isfinite(figure.score)
    ]


def _identifier(test: str) -> str:
    """Unique identifier of a test set on the Hub, which merges results that share one."""
    slug = re.sub(r"[^a-z0-9]+", "-", test.lower()).strip("-")
    if slug.replace("-", "_") == test:
        return slug
    digest = hashlib.sha256(test.encode(errors="replace")).hexdigest()[:8]
    return f"{slug}-{digest}" if slug else digest


def _signature(figure: MetricScore) -> str:
    """Signature as `hf-vaswani score` prints it, with absolute paths cut to their last part."""
    parts = (part.partition(":") for part in figure.signature.split("|"))
    return one_line("|".join(f"{name}{colon}{without_paths(value)}" for name, colon, value in parts))


def _table(test: str, report: Report) -> str:
    figures = [replace(figure, signature=_signature(figure)) for figure in report.figures]
    comparisons = [replace(compared, baseline=Path(compared.baseline).name) for compared in report.comparisons]
    return as_text(Report(test, report.sentences, report.empty, figures, comparisons), markdown=True, level=4)


# Sections


def _averaged(run: Run) -> str | None:
    if run.averaged is None:
        return None
    if "checkpoints" not in run.averaged:
        method, decay = (as_markdown(run.averaged.get(name)) for name in ("method", "decay"))
        return f"The weights are an {method}, with a decay of {decay}."
    names = run.averaged["checkpoints"]
    return f"The weights are the mean of {len(names)} checkpoints: {_names(names)}."


def _names(files: list[str]) -> str:
    """Names of files or folders, without their paths."""
    return ", ".join(as_code(Path(name).name) for name in without_paths(files))


def _search(search) -> str:
    parts = ["greedy search" if search.num_beams == 1 else f"a beam of {search.num_beams}"]
    if search.num_beams > 1:
        form = getattr(search, "length_penalty_form", "length")
        kind = "GNMT's length penalty" if form == "gnmt" else "transformers' length penalty"
        parts.append(f"{kind} of {as_markdown(search.length_penalty)}")
    if (extra := getattr(search, "max_extra_tokens", None)) is not None:
        parts.append(f"at most {as_markdown(extra)} tokens more than the source")
    return ", ".join(parts)


def _data(run: Run, tokenizer: PreTrainedTokenizerBase, config: VaswaniConfig) -> list[tuple[str, str]]:
    values, rows = run.values, []
    if run.origin is not None:
        rows.append(("Data of the original", "not recorded by the conversion"))
    if run.record is None and not run.is_converted:
        rows.append(("Files and their fingerprints", "not recorded (the run has no `run.json`)"))
        if files := (run.named or {}).get("train_files"):
            rows.append(("Files in the recipe", ", ".join(map(as_code, without_paths(files)))))
    elif values.get("dataset_name"):
        name = values["dataset_name"]
        parts = [values.get("dataset_config"), values.get("train_split")]
        address = f"https://huggingface.co/datasets/{quote(name, safe='/', errors='replace')}"
        text = f"[{as_markdown(name)}]({address}), {', '.join(as_markdown(part) for part in parts if part)}"
        rows.append(("Data set", text))
    for position, name in enumerate(values.get("train_files") or []) if run.record else ():
        entry = values.get(f"train_files[{position}]")
        fingerprint = f", {entry['size']:,} bytes, SHA-256 {as_code(entry['sha256'])}" if entry else ""
        rows.append(("Training file", f"{_names([name])}{fingerprint}"))
    symbols = symbol_ids(tokenizer)
    unit = "trees" if symbols else "pairs"
    if run.record and "pairs" not in values:
        rows.append((f"Training {unit}", "not counted: the data was streamed"))
    elif values.get("pairs"):
        rows.append((f"Training {unit}", f"{values['pairs']:,} (after filtering by length)"))
    if run.record and (files := values.get("eval_files")):
        rows.append(("Validation files", _names(files)))
    kind = type(tokenizer.backend_tokenizer.model).__name__
    shared = "shared by both languages" if config.source_vocab_size is None else f"{config.vocab_size:,} of the target"
    if symbols:
        brackets = sum(len(symbol) > 1 and symbol[0] in "()" for symbol in symbols)
        tags = len(symbols) - brackets
        shared = f"of the words of one language; each of {brackets:,} brackets and {tags:,} tags is one token"
    elif isinstance(tokenizer, TwoSidedTokenizer):
        shared += "; two segmentations, one of sources and one of given translations"
    rows.append(("Vocabulary", f"{len(tokenizer):,} entries, {kind}, {shared}"))
    return rows


def _compute(run: Run, model: PreTrainedModel, card_options: CardOptions) -> list[tuple[str, str]]:
    if run.is_converted:
        return [("Training of the original", "not recorded by the conversion; no weight was trained since")]
    if run.state is None:
        return [("Updates, tokens and time", "not recorded (no `trainer_state.json` for these weights)")]
    values = run.values
    devices = values["devices"] if run.record else 1
    try:
        spent = cost(_measured(run.state), model.num_parameters(exclude_embeddings=True), devices)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise DataError(f"{STATE_NAME}: its log cannot be read: {error!r}.") from error
    unit = "trees" if card_options.is_parser else "pairs"
    pairs = f" (about {spent.epochs * values['pairs']:,.0f} {unit})" if values.get("pairs") else ""
    rows = [("Updates", f"{spent.updates:,}"), ("Epochs", f"{spent.epochs:.1f}{pairs}")]
    source, target = spent.source_tokens, spent.target_tokens
    count = f"{source:,}, padding included (from the Trainer's `total_flos`)" if source else "not recorded"
    rows.append(("Source tokens seen", count))
    assumed = "" if run.record else ", assuming one device"
    estimated = f"about {_rounded(target)} (estimate, from the logged rate and time{assumed})" if target else None
    rows.append(("Target tokens seen", estimated or "not recorded"))
    rows.append(("Time", _time(spent)))
    rows.append(("Hardware", as_markdown(card_options.hardware) if card_options.hardware else _devices(run)))
    if source:
        total = operations(model, source, target or source)
        same = "" if target else ", assuming as many target as source tokens"
        text = f"about {total:.1e} (estimate: 6 for each token and each weight applied to it{same})"
        rows.append(("Floating point operations", text))
    rows.append(("Energy", _energy(spent.seconds, card_options.watts)))
    return rows


def _measured(state: dict) -> dict:
    """The state without null entries in its log: values that were not finite are read as null."""
    entries = [{name: value for name, value in entry.items() if value is not None} for entry in state["log_history"]]
    return {**state, "log_history": entries}


def _rounded(count: int) -> str:
    """The count rounded to three significant digits."""
    return f"{round(count, 3 - len(str(count))):,}"


def _time(spent: Cost) -> str:
    if spent.seconds is None and spent.measured_seconds is None:
        return "not recorded"
    if spent.measured_updates == spent.updates:
        return f"{_hours(spent.measured_seconds)}, evaluation included"
    measured = f"{_hours(spent.measured_seconds)} for the last {spent.measured_updates:,} updates"
    if spent.seconds is None:
        return f"{measured}; earlier time not recorded"
    return f"about {_hours(spent.seconds)} (estimate, from the logged rates; measured: {measured})"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def _devices(run: Run) -> str:
    if run.record is None:
        return "not recorded"
    count, recorded = run.values["devices"], run.values.get("hardware")
    on_cpu = recorded.get("device") == "cpu" if recorded else run.values.get("use_cpu")
    singular, plural = ("process on the CPU", "processes on the CPU") if on_cpu else ("accelerator", "accelerators")
    text = f"{count} {singular if count == 1 else plural}"
    if recorded is None:
        return f"{text}; model not recorded"
    cores = f" (cores available: {as_markdown(recorded.get('cores'))})" if on_cpu else ""
    return f"{text}{':' if count == 1 else '; the first:'} {as_markdown(recorded.get('name'))}{cores}"


def _energy(seconds: float | None, watts: float | None) -> str:
    if watts is None or seconds is None:
        return "neither measured nor estimated: " + ("the time is unknown" if watts else "the power is unknown")
    text = f"{watts:g} W, the assumed mean draw, times the time above; cooling and idle machines are not included"
    return f"about {watts * seconds / 3.6e6:.2g} kWh (estimate: {text})"


def _recipe(run: Run, config) -> tuple[str | None, str]:
    if run.record is not None:
        note = "Recipe of the run: all fields that differ from the paper's defaults. Paths are cut to file names."
        return recorded_recipe(run, config), note
    if run.recipe is not None:
        note = "Recipe according to the publisher: the run did not record its arguments."
        if run.state and (steps := run.values["max_steps"]) and steps != run.state["max_steps"]:
            note += f" According to the run's log, `max_steps` was {as_markdown(run.state['max_steps'])}."
        return run.recipe, note
    return None, "" if run.is_converted else "The run's arguments were not recorded."


def _deviations_note(run: Run, papers: PapersModel, any_found: bool) -> str:
    compared = "configuration, training arguments and search settings"
    if run.is_converted and run.named is None:
        compared = "configuration and search settings only; the training of the original is not recorded"
    elif run.record is None and run.named is None:
        compared = "configuration and search settings only; the run's arguments were not recorded"
    elif run.record is None:
        compared = "configuration, search settings and the recipe above"
    ending = "" if any_found else " There are no differences."
    if papers.is_parser:
        ending += " The paper does not state the dropout and the learning rate of its parser."
    return f"Comparison with the paper's {papers.name}: {compared}.{ending}"


def _curves(run: Run) -> bytes | None:
    if run.state is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / STATE_NAME).write_text(
            json.dumps(finite(_measured(run.state)), allow_nan=False), encoding="utf-8"
        )
        try:
            draw_curves(folder, str(Path(folder) / CURVES))
        except ImportError as error:
            logger.warning("The card gets no picture of the curves. %s", error)
            return None
        return (Path(folder) / CURVES).read_bytes()


# An existing card


def metadata(text: str) -> dict:
    """Metadata of a card.

    Raises:
        ValueError: The metadata is not valid for the Hub.
    """
    if not REGEX_YAML_BLOCK.search(text):
        return {}
    try:
        return ModelCard(text).data.to_dict()
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"The metadata at the top of the card cannot be read: {one_line(error)}") from error


def sections(text: str) -> list[Section]:
    """Generated sections of a card, in order.

    Raises:
        ValueError: The opening or closing comment of a section is missing or duplicated.
    """
    opening: re.Match | None = None
    complete, names = [], set()
    for marker in MARKER.finditer(text):
        name, closes = marker["name"], bool(marker["end"])
        if closes != (opening is not None) or (name != opening["name"] if closes else name in names):
            raise _malformed_section(opening["name"] if opening else name)
        if closes:
            complete.append(Section(name, opening.start(), marker.end(), text[opening.end() : marker.start()]))
        opening = None if closes else marker
        names.add(name)
    if opening is not None:
        raise _malformed_section(opening["name"])
    return complete


def _malformed_section(name: str) -> ValueError:
    return ValueError(
        f"The card's section {name!r} should have one comment <!-- hf-vaswani: {name} --> before it and one "
        f"<!-- /hf-vaswani: {name} --> after it."
    )


def _replace_sections(text: str, replacements: dict[str, str]) -> str:
    """Replace generated sections, comments included, by the texts of the same names."""
    parts, position = [], 0
    for section in sections(text):
        parts += [text[position : section.start], replacements.get(section.name, text[section.start : section.end])]
        position = section.end
    return "".join([*parts, text[position:]])


def _split(text: str) -> tuple[str, str]:
    """The metadata block of a card, and the rest of its text."""
    head = REGEX_YAML_BLOCK.search(text)
    return (head[0], text[head.end() :]) if head else ("", text)


def shows_curves(text: str) -> bool:
    """True if a generated section of the card shows the picture of the curves."""
    picture = re.compile(rf"^!\[[^\]\n]*\]\({re.escape(CURVES)}\)", re.MULTILINE)
    return any(picture.search(section.text) for section in sections(_split(text)[1]))


def written_by_hand(text: str) -> tuple[str, dict]:
    """Handwritten parts of a card: the text outside of generated sections, and the metadata without scores."""
    body = _split(text)[1]
    handwritten = _replace_sections(body, {section.name: "" for section in sections(body)})
    return handwritten, {key: value for key, value in metadata(text).items() if key not in SCORED}


def merge(earlier: str, card: ModelCard, weights: str, given: set[str]) -> str:
    """Update the generated sections and the metadata of a card that may have handwritten text.

    Args:
        earlier (`str`): Existing card.
        card (`ModelCard`): New card.
        weights (`str`): Weights of the new card, from `weights_of`. Earlier scores of the same weights stay, on the
            test sets that the new card does not have.
        given (`set[str]`): Metadata keys to overwrite with the publisher's values; other existing keys stay.

    Returns:
        The text of `earlier` with updated sections and metadata. A section whose comments were removed is not
        restored. A card without generated sections is returned unchanged.

    Raises:
        ValueError: The opening or closing comment of a section is missing or duplicated.
    """
    head, body = _split(earlier)
    existing = {section.name: section.text for section in sections(body)}
    if not existing:
        logger.warning("The existing card has no generated sections: it stays unchanged. Remove it for a new one.")
        return earlier
    updated = {section.name: section.text for section in sections(card.text)}
    data, old_scores = card.data, existing.get("scores", "")
    keep_scores = weights in old_scores and not _tests(updated["scores"])[1]
    if keep_scores:
        updated.pop("scores")
    elif weights in old_scores:
        data = _with_other_results(data, earlier, old_scores, updated["scores"])
        updated["scores"] = _with_other_tests(updated["scores"], old_scores)
    newline = "\r\n" if "\r\n" in earlier else "\n"
    marked = {
        name: f"<!-- hf-vaswani: {name} -->{text}<!-- /hf-vaswani: {name} -->".replace("\n", newline)
        for name, text in updated.items()
    }
    return _merge_metadata(earlier, head, data, given, keep_scores, newline) + _replace_sections(body, marked)


def _tests(scores: str) -> tuple[str, dict[str, str]]:
    """Introduction of a scores section, and the scores on each test set by heading."""
    introduction, *tests = (text.strip() for text in TEST.split(scores.replace("\r\n", "\n")))
    return introduction, {text.partition("\n")[0]: text for text in tests}


def _with_other_tests(new: str, old: str) -> str:
    """The new scores section, with the old scores on other test sets."""
    (introduction, tests), (_, others) = _tests(new), _tests(old)
    return "\n" + "\n\n".join([introduction, *(others | tests).values()]) + "\n"


def _with_other_results(data: ModelCardData, earlier: str, old: str, new: str) -> ModelCardData:
    """The new metadata, with the earlier card's results on other test sets in their original order."""
    before, new_results = ModelCard(earlier).data, _by_test(data.eval_results or [])
    (_, old_tests), (_, new_tests) = _tests(old), _tests(new)
    old_results = {}
    for name, results in _by_test(before.eval_results or []).items():
        heading = f"### {as_markdown(name)}"
        if name in new_results or (heading in old_tests and heading not in new_tests):
            old_results[name] = [result for result in results if _is_finite(result.metric_value)]
    data = copy(data)
    data.eval_results = list(chain.from_iterable((old_results | new_results).values())) or None
    data.metrics = sorted({result.metric_type for result in data.eval_results or []}) or None
    data.model_name = data.model_name or before.model_name
    return data


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _by_test(results: list[EvalResult]) -> dict[str, list[EvalResult]]:
    return {name: list(group) for name, group in groupby(results, lambda result: result.dataset_name)}


def _merge_metadata(
    earlier: str, head: str, data: ModelCardData, given: set[str], keep_scores: bool, newline: str
) -> str:
    """Merged metadata block; the earlier block verbatim if no value changes."""
    before, now = metadata(earlier), data.to_dict()
    merged = {**now, **before, **{key: now[key] for key in given & now.keys()}}
    if not keep_scores:
        merged = {key: value for key, value in merged.items() if key not in SCORED}
        merged |= {key: now[key] for key in SCORED if key in now}
    if head and merged == before:
        return head
    order = [*(key for key in before if key in merged), *(key for key in merged if key not in before)]
    text = ModelCardData(**merged).to_yaml(line_break=newline, original_order=order)
    return f"---{newline}{text}{newline}---{newline}"
