"""Write a model card from what a run recorded: `model_card.md`, filled in and laid under what people wrote.

A card has two kinds of text. What stands between `<!-- hf-vaswani: NAME -->` and `<!-- /hf-vaswani: NAME -->` is
written anew each time; all else, headings included, is written once and then left alone, as is a card that has no such
comments.
"""

import hashlib
import json
import logging
import math
import re
import tempfile
from copy import copy
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import chain, groupby
from pathlib import Path
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.readers import DataError
from ..evaluation.metrics import MetricScore
from ..evaluation.report import Report, as_text, finite
from ..inference.translation import translate
from ..markdown import UNWRITABLE, as_code, as_code_block, as_markdown, as_paragraph, one_line
from ..trainer.averaging import RECORD as AVERAGE_RECORD
from ..trainer.checkpoints import STATE_NAME
from ..trainer.cost import Cost, cost, operations
from ..trainer.resumable_trainer import MANIFEST_NAME
from .curves import draw_curves
from .deviations import deviations, nearest_row
from .recipe import recorded_recipe
from .records import Run, without_paths
from .tensorboard_log import scalars


logger = logging.getLogger(__name__)


CURVES = "curves.png"
UNKNOWN_LICENSE = "unknown"
AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoTokenizer")
# The Hub's names of metrics, by what our figures are called.
HUB_METRICS = {
    "sacreBLEU": "sacrebleu",
    "tokenised BLEU": "bleu",
    "compound-split BLEU": "bleu",
    "chrF": "chrf",
    "chrF++": "chrf",
    "TER": "ter",
    "COMET": "comet",
    "perplexity per token": "perplexity",
    "perplexity per word": "perplexity",
}
SCORED = ("metrics", "model-index")  # metadata that comes and goes with the scores
MARKER = re.compile(r"<!-- (?P<end>/?)hf-vaswani: (?P<name>\w+) -->")
TEST = re.compile(r"^(?=### )", re.MULTILINE)  # where the scores on one test set begin


@dataclass(frozen=True)
class Section:
    """A generated section: its name, where it begins and ends with its comments, and the text between them."""

    name: str
    start: int
    end: int
    text: str


@dataclass
class CardOptions:
    """What the publisher says, as no run records it.

    Attributes:
        license (`str`, *optional*): One of the Hub's identifiers.
        languages (`list[str]`, *optional*): Source and target.
        datasets (`list[str]`, *optional*): On the Hub; the run's, if it is from there, when not given.
        run (`str`, *optional*): Folder of the run, where the checkpoint does not lie in it.
        recipe (`str`, *optional*): Path or name of the recipe, for runs that recorded none.
        hardware (`str`, *optional*): What it was trained on.
        watts (`float`, *optional*): What that drew, on average.
        example (`str`, *optional*): Sentence to translate in the card.
        reports (`dict[str, Report]`): Scores by the name of the test set.
        score_commands (`dict[str, str]`): What gives the same scores, by the name of the test set.
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


def write_card(
    checkpoint: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    repo: str,
    card_options: CardOptions,
    run: Run,
) -> tuple[ModelCard, dict[str, bytes]]:
    """A new card, and what goes with it: the picture of the curves, the run's records without paths, and its log.

    Args:
        checkpoint (`Path`): Folder of the weights.
        model, tokenizer: Of that folder.
        repo (`str`): Where the model is to be found, for the code that loads it; `user/name`.
        card_options (`CardOptions`): What the publisher says.
        run (`Run`): What it recorded, from `find_run`.
    """
    picture = _curves(run)
    card_options = replace(
        card_options, reports=_by_line(card_options.reports), score_commands=_by_line(card_options.score_commands)
    )
    quoted_repo = _quoted(repo)
    card = ModelCard.from_template(
        _metadata(repo, card_options, run.values),
        template_str=(resources.files(__package__) / "model_card.md").read_text(encoding="utf-8"),
        md=as_markdown,
        paragraph=as_paragraph,
        code=as_code,
        code_block=as_code_block,
        name=repo.split("/")[-1],
        repo=quoted_repo,
        loading=[f"{each}.from_pretrained({quoted_repo}, trust_remote_code=True)" for each in AUTO_CLASSES],
        languages=card_options.languages,
        weights=weights_of(checkpoint),
        curves=CURVES if picture else None,
        license=card_options.license or UNKNOWN_LICENSE,
        **_about_model(run, model, tokenizer, card_options.example),
        **_about_scores(card_options),
        **_about_training(run, model, tokenizer, card_options),
    )
    records = {STATE_NAME: run.state, MANIFEST_NAME: run.record, AVERAGE_RECORD: run.averaged}
    files = {name: _as_json(record) for name, record in records.items() if record is not None}
    events = scalars(run.events, run.state["global_step"]) if run.state else {}
    return card, files | events | ({CURVES: picture} if picture else {})


def _by_line(named: dict) -> dict:
    return {one_line(name) or "unnamed": value for name, value in named.items()}


def _quoted(text: str) -> str:
    """A string of Python, on one line, in which no comment of HTML begins."""
    return json.dumps(UNWRITABLE.sub("\ufffd", text), ensure_ascii=False, allow_nan=False).replace(
        "<!--", "\\u003c!--"
    )


def _as_json(record: dict) -> bytes:
    text = json.dumps(finite(without_paths(record)), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode(errors="replace")


def _about_model(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentence: str | None) -> dict:
    return {
        "config": model.config,
        "parameters": model.num_parameters(),
        "averaged": _averaged(run),
        "search": _search(model.generation_config),
        "quoted_example": _quoted(sentence or "..."),
        "example": (sentence, translate(model, tokenizer, [sentence])[0]) if sentence else None,
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
    found = deviations(run, model.config, model.generation_config)
    return {
        "data": _data(run, tokenizer),
        "compute": _compute(run, model, card_options),
        "recipe": recipe,
        "recipe_note": recipe_note,
        "deviations": found,
        "deviations_note": _deviations_note(run, nearest_row(model.config), bool(found)),
    }


def weights_of(checkpoint: Path) -> str:
    """The weights' files with their SHA-256."""
    checksums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
    return ", ".join(
        f"{as_code(name)} (SHA-256 {as_code(known['sha256'])})" for name, known in sorted(checksums.items())
    )


# Metadata


def _metadata(repo: str, card_options: CardOptions, values: dict) -> ModelCardData:
    results = [r for test, report in card_options.reports.items() for r in eval_results(test, report)]
    datasets = card_options.datasets or ([values["dataset_name"]] if values.get("dataset_name") else None)
    return ModelCardData(
        language=_lines(card_options.languages),
        license=_lines(card_options.license) or UNKNOWN_LICENSE,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vaswani", "attention-is-all-you-need"],
        datasets=_lines(datasets),
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=one_line(repo.split("/")[-1]) if results else None,
        eval_results=results or None,
    )


def _lines(value):
    """Texts on one line each: YAML as it is written has not every character that stands for a line's end."""
    if isinstance(value, list):
        return [_lines(item) for item in value]
    return one_line(value) if isinstance(value, str) else value


def eval_results(test: str, report: Report) -> list[EvalResult]:
    """The Hub's form of a report's scores, as far as they are finite: it takes no others.

    Args:
        test (`str`): Name of the test set.
        report (`Report`): Scores on it.
    """
    return [
        EvalResult(
            task_type="translation",
            task_name="Translation",
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
    """Of a test set, for the Hub; no two names share one, as results of one identifier are of one set there."""
    found = re.sub(r"[^a-z0-9]+", "-", test.lower()).strip("-")
    if found.replace("-", "_") == test:
        return found
    digest = hashlib.sha256(test.encode(errors="replace")).hexdigest()[:8]
    return f"{found}-{digest}" if found else digest


def _signature(figure: MetricScore) -> str:
    """As the command prints it, but for the folders of an absolute path, which tell nobody else anything."""
    parts = (part.partition(":") for part in figure.signature.split("|"))
    return one_line("|".join(f"{name}{colon}{without_paths(value)}" for name, colon, value in parts))


def _table(test: str, report: Report) -> str:
    figures = [replace(figure, signature=_signature(figure)) for figure in report.figures]
    comparisons = [replace(each, baseline=Path(each.baseline).name) for each in report.comparisons]
    return as_text(Report(test, report.sentences, report.empty, figures, comparisons), markdown=True, level=4)


# Sections


def _averaged(run: Run) -> str | None:
    if run.averaged is None:
        return None
    if "checkpoints" not in run.averaged:
        method, decay = (as_markdown(run.averaged.get(name)) for name in ("method", "decay"))
        return f"The weights are an {method}, with a decay of {decay}."
    names = run.averaged["checkpoints"]
    return f"The weights are the mean of those of {len(names)} checkpoints: {_names(names)}."


def _names(files: list[str]) -> str:
    """Names of files or folders, without where they lie."""
    return ", ".join(as_code(Path(name).name) for name in without_paths(files))


def _search(search) -> str:
    beams = "greedily" if search.num_beams == 1 else f"a beam of {search.num_beams}"
    parts = [beams]
    if search.num_beams > 1:
        form = getattr(search, "length_penalty_form", "length")
        kind = "GNMT's length penalty" if form == "gnmt" else "transformers' length penalty"
        parts.append(f"{kind} with {as_markdown(search.length_penalty)}")
    if (extra := getattr(search, "max_extra_tokens", None)) is not None:
        parts.append(f"at most {as_markdown(extra)} tokens more than the source")
    return ", ".join(parts)


def _data(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    values, rows = run.values, []
    if run.record is None:
        rows.append(("Files and their fingerprints", "not recorded (the run has no `run.json`)"))
        if files := (run.named or {}).get("train_files"):
            rows.append(("Files that the recipe names", ", ".join(map(as_code, without_paths(files)))))
    elif values.get("dataset_name"):
        name = values["dataset_name"]
        parts = [values.get("dataset_config"), values.get("train_split")]
        address = f"https://huggingface.co/datasets/{quote(name, safe='/', errors='replace')}"
        text = f"[{as_markdown(name)}]({address}), {', '.join(as_markdown(part) for part in parts if part)}"
        rows.append(("Data set", text))
    for position, name in enumerate(values.get("train_files") or []) if run.record else ():
        known = values.get(f"train_files[{position}]")
        mark = f", {known['size']:,} bytes, SHA-256 {as_code(known['sha256'])}" if known else ""
        rows.append(("Training file", f"{_names([name])}{mark}"))
    if run.record and "pairs" not in values:
        rows.append(("Pairs trained on", "not counted: they were read as a stream"))
    elif values.get("pairs"):
        rows.append(("Pairs trained on", f"{values['pairs']:,} (after filtering by length)"))
    if run.record and (files := values.get("eval_files")):
        rows.append(("Evaluated on while training", _names(files)))
    kind = type(tokenizer.backend_tokenizer.model).__name__
    rows.append(("Vocabulary", f"{len(tokenizer):,} entries, {kind}, one for both languages"))
    return rows


def _compute(run: Run, model: PreTrainedModel, card_options: CardOptions) -> list[tuple[str, str]]:
    if run.state is None:
        return [("Updates, tokens and time", "not recorded (no `trainer_state.json` of these weights)")]
    values = run.values
    devices = values["devices"] if run.record else 1
    try:
        spent = cost(_measured(run.state), model.num_parameters(exclude_embeddings=True), devices)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise DataError(f"{STATE_NAME}: its log cannot be read: {error!r}.") from error
    pairs = f" (about {spent.epochs * values['pairs']:,.0f} pairs)" if values.get("pairs") else ""
    rows = [("Updates", f"{spent.updates:,}"), ("Passes over the data", f"{spent.epochs:.1f}{pairs}")]
    source, target = spent.source_tokens, spent.target_tokens
    count = f"{source:,}, padding included (from the Trainer's `total_flos`)" if source else "not recorded"
    rows.append(("Source tokens seen", count))
    alone = "" if run.record else ", if it ran on one device"
    estimated = f"about {_rounded(target)} (estimate, from the logged rate and time{alone})" if target else None
    rows.append(("Target tokens seen", estimated or "not recorded"))
    rows.append(("Time", _time(spent)))
    rows.append(("Hardware", as_markdown(card_options.hardware) if card_options.hardware else _devices(run)))
    if source:
        total = operations(model, source, target or source)
        same = "" if target else ", and as many target as source tokens"
        text = f"about {total:.1e} (estimate: 6 for each token and weight it passes{same})"
        rows.append(("Floating point operations", text))
    rows.append(("Energy", _energy(spent.seconds, card_options.watts)))
    return rows


def _measured(state: dict) -> dict:
    """The same, without what was logged as a number that is not finite: null, as the run's records are read."""
    known = ({name: value for name, value in entry.items() if value is not None} for entry in state["log_history"])
    return {**state, "log_history": list(known)}


def _rounded(count: int) -> str:
    """With three digits that count."""
    return f"{round(count, 3 - len(str(count))):,}"


def _time(spent: Cost) -> str:
    if spent.seconds is None and spent.measured_seconds is None:
        return "not recorded"
    if spent.measured_updates == spent.updates:
        return f"{_hours(spent.measured_seconds)}, evaluation included"
    measured = f"{_hours(spent.measured_seconds)} for the last {spent.measured_updates:,} updates"
    if spent.seconds is None:
        return f"{measured}; before that, not recorded"
    return f"about {_hours(spent.seconds)} (estimate, from the logged rates; {measured} was measured)"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def _devices(run: Run) -> str:
    if run.record is None:
        return "not recorded"
    count, known = run.values["devices"], run.values.get("hardware")
    on_cpu = known.get("device") == "cpu" if known else run.values.get("use_cpu")
    one, more = ("process on the CPU", "processes on the CPU") if on_cpu else ("accelerator", "accelerators")
    text = f"{count} {one if count == 1 else more}"
    if known is None:
        return f"{text}; of what make is not recorded"
    cores = f" (cores available: {as_markdown(known.get('cores'))})" if on_cpu else ""
    return f"{text}{':' if count == 1 else '; the first:'} {as_markdown(known.get('name'))}{cores}"


def _energy(seconds: float | None, watts: float | None) -> str:
    if watts is None or seconds is None:
        return "not measured, and not estimated: " + ("no time is known" if watts else "no power is known")
    text = f"{watts:g} W, assumed as the mean draw, times the time above; cooling and idle machines not counted"
    return f"about {watts * seconds / 3.6e6:.2g} kWh (estimate: {text})"


def _recipe(run: Run, config) -> tuple[str | None, str]:
    if run.record is not None:
        note = "The recipe: all fields that differ from the defaults, which are the paper's (paths without folders)."
        return recorded_recipe(run, config), note
    if run.recipe is not None:
        note = "The recipe, as the publisher names it: the run itself did not record its arguments."
        if run.state and (steps := run.values["max_steps"]) and steps != run.state["max_steps"]:
            note += f" According to its log, `max_steps` was {as_markdown(run.state['max_steps'])}."
        return run.recipe, note
    return None, "The run's arguments were not recorded."


def _deviations_note(run: Run, row: str, any_found: bool) -> str:
    known = "the configuration, the arguments and the search settings are compared"
    if run.record is None and run.named is None:
        known = "only configuration and search settings are compared, as the run's arguments were not recorded"
    elif run.record is None:
        known = "configuration, search settings and the recipe named above are compared"
    ending = "" if any_found else " No difference was found."
    return f"Compared with the paper's {row} model: {known}.{ending}"


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
            logger.warning("The card has no picture of the curves. %s", error)
            return None
        return (Path(folder) / CURVES).read_bytes()


# A card that is there already


def metadata(text: str) -> dict:
    """The metadata of a card.

    Raises:
        ValueError: They are not what the Hub takes.
    """
    if not REGEX_YAML_BLOCK.search(text):
        return {}
    try:
        return ModelCard(text).data.to_dict()
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"The metadata at the top of the card cannot be read: {one_line(error)}") from error


def sections(text: str) -> list[Section]:
    """The generated sections of a card, in their order.

    Raises:
        ValueError: The comment that begins or ends a section is missing, or stands twice.
    """
    begun: re.Match | None = None
    found, known = [], set()
    for marker in MARKER.finditer(text):
        name, ends = marker["name"], bool(marker["end"])
        if ends != (begun is not None) or (name != begun["name"] if ends else name in known):
            raise _wrong_section(begun["name"] if begun else name)
        if ends:
            found.append(Section(name, begun.start(), marker.end(), text[begun.end() : marker.start()]))
        begun = None if ends else marker
        known.add(name)
    if begun is not None:
        raise _wrong_section(begun["name"])
    return found


def _wrong_section(name: str) -> ValueError:
    return ValueError(
        f"The card's section {name!r} should have one comment <!-- hf-vaswani: {name} --> before it and one "
        f"<!-- /hf-vaswani: {name} --> after it."
    )


def _replaced(text: str, renewed: dict[str, str]) -> str:
    """A card with other texts, by name, for its generated sections and the comments around them."""
    parts, reached = [], 0
    for section in sections(text):
        parts += [text[reached : section.start], renewed.get(section.name, text[section.start : section.end])]
        reached = section.end
    return "".join([*parts, text[reached:]])


def _split(text: str) -> tuple[str, str]:
    """The block of metadata of a card, and what comes after it."""
    head = REGEX_YAML_BLOCK.search(text)
    return (head[0], text[head.end() :]) if head else ("", text)


def shows_curves(text: str) -> bool:
    """Whether a generated section of a card shows the picture."""
    picture = re.compile(rf"^!\[[^\]\n]*\]\({re.escape(CURVES)}\)", re.MULTILINE)
    return any(picture.search(section.text) for section in sections(_split(text)[1]))


def written_by_hand(text: str) -> tuple[str, dict]:
    """What people may have written in a card: the text without its generated sections, and metadata."""
    body = _split(text)[1]
    others = _replaced(body, {section.name: "" for section in sections(body)})
    return others, {key: value for key, value in metadata(text).items() if key not in SCORED}


def merge(earlier: str, card: ModelCard, weights: str, given: set[str]) -> str:
    """What is generated, renewed in a card that may have been written on.

    Args:
        earlier (`str`): The card that is there.
        card (`ModelCard`): The new one.
        weights (`str`): Of the new one; scores of these are kept on test sets of which the new card has none.
        given (`set[str]`): Keys of the metadata that the publisher asks for now; others that are there stay.

    Returns:
        The text of `earlier` with its generated sections and metadata renewed. A section whose comments were removed
        does not come back; without any, the card was written by hand and stays as it is.

    Raises:
        ValueError: The comment that begins or ends a section is missing, or stands twice.
    """
    head, body = _split(earlier)
    there = {section.name: section.text for section in sections(body)}
    if not there:
        logger.warning("The card that is there has no generated sections: it stays as it is. Remove it for a new one.")
        return earlier
    renewed = {section.name: section.text for section in sections(card.text)}
    data, known = card.data, there.get("scores", "")
    keep_scores = weights in known and not _tests(renewed["scores"])[1]
    if keep_scores:
        renewed.pop("scores")
    elif weights in known:
        data = _with_other_results(data, earlier, known, renewed["scores"])
        renewed["scores"] = _with_other_tests(renewed["scores"], known)
    newline = "\r\n" if "\r\n" in earlier else "\n"
    marked = {
        name: f"<!-- hf-vaswani: {name} -->{text}<!-- /hf-vaswani: {name} -->".replace("\n", newline)
        for name, text in renewed.items()
    }
    return _merge_metadata(earlier, head, data, given, keep_scores, newline) + _replaced(body, marked)


def _tests(scores: str) -> tuple[str, dict[str, str]]:
    """What a section of scores begins with, and the scores on each test set by their heading."""
    beginning, *tests = (text.strip() for text in TEST.split(scores.replace("\r\n", "\n")))
    return beginning, {text.partition("\n")[0]: text for text in tests}


def _with_other_tests(new: str, known: str) -> str:
    """The new section of scores, with what is known of test sets that it has not."""
    (beginning, tests), (_, others) = _tests(new), _tests(known)
    return "\n" + "\n\n".join([beginning, *(others | tests).values()]) + "\n"


def _with_other_results(data: ModelCardData, earlier: str, known: str, new: str) -> ModelCardData:
    """The new metadata, with the earlier card's results, in their places, on test sets that it has not."""
    before, found = ModelCard(earlier).data, _by_test(data.eval_results or [])
    (_, old_tests), (_, new_tests) = _tests(known), _tests(new)
    kept = {}
    for name, results in _by_test(before.eval_results or []).items():
        heading = f"### {as_markdown(name)}"
        if name in found or (heading in old_tests and heading not in new_tests):
            kept[name] = [result for result in results if _is_finite(result.metric_value)]
    data = copy(data)
    data.eval_results = list(chain.from_iterable((kept | found).values())) or None
    data.metrics = sorted({result.metric_type for result in data.eval_results or []}) or None
    data.model_name = data.model_name or before.model_name
    return data


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _by_test(results: list[EvalResult]) -> dict[str, list[EvalResult]]:
    return {name: list(found) for name, found in groupby(results, lambda result: result.dataset_name)}


def _merge_metadata(
    earlier: str, head: str, data: ModelCardData, given: set[str], keep_scores: bool, newline: str
) -> str:
    """The block of metadata; as it was, letter for letter, where nothing of it changes."""
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
