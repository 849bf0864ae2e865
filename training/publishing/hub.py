"""Push a checkpoint to the Hub with a card that is written from its run; renew a card in place."""

import re
import shlex
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from sacrebleu.metrics.base import Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_vaswani

from ..evaluation.compound_split import LANGUAGES
from ..evaluation.metrics import DEFAULT_METRICS, build_metrics, compare, measure
from ..evaluation.perplexity import perplexities
from ..evaluation.report import Report
from ..evaluation.test_sets import Texts
from ..files import written_whole
from ..inference.loading import load_checkpoint
from ..inference.translation import translate
from ..trainer.averaging import RECORD as AVERAGE_RECORD
from ..trainer.checkpoints import STATE_NAME
from ..trainer.resumable_trainer import MANIFEST_NAME
from .model_card import CURVES, CardOptions, merge, metadata, shows_curves, weights_of, write_card, written_by_hand
from .records import Run, find_run, first_source
from .tensorboard_log import NAME as EVENTS


CARD = "README.md"
WEIGHTS = [r"model[\w.-]*\.safetensors", r"model\.safetensors\.index\.json"]
CODE = sorted(path.name for path in Path(hf_vaswani.__file__).parent.glob("*_vaswani.py"))
# What makes a checkpoint; not the optimiser's state and other pickles that the Trainer leaves beside it.
NAMES = [*CODE, "checksums.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
RECORDS = [STATE_NAME, MANIFEST_NAME, AVERAGE_RECORD]  # written by `write_card`, without paths
RESAMPLES = 1000


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and the model and tokenizer in it."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvaluationSet:
    """What is to be translated and scored.

    Attributes:
        name (`str`): Of the test set.
        texts (`Texts`): Sources, references, and translations by others to compare with.
        files (`list[str]`): Of the sources, and then of the references.
        tokenized (`bool`): The text is already tokenised.
    """

    name: str
    texts: Texts
    files: list[str]
    tokenized: bool = False

    def metrics(self, language: str | None) -> tuple[str, ...]:
        """What is computed, of `metrics.METRICS`: also the paper's count, for a target language that it knows."""
        return (*DEFAULT_METRICS, "compound-bleu") if language in LANGUAGES else DEFAULT_METRICS

    def command(self, model: str, language: str | None) -> str:
        """What gives the same scores."""
        sources, *references = (Path(file).name for file in self.files)
        words = ["hf-vaswani", "score", "--model", model, "--sources", sources, "--references", *references]
        words += ["--tokenized"] if self.tokenized else []
        words += ["--baseline", *(name for name, _ in self.texts.baselines)] if self.texts.baselines else []
        if language in LANGUAGES:
            words += ["--metrics", *self.metrics(language)] + ([] if self.tokenized else ["--language", language])
        return shlex.join([*words, "--bootstrap"])


def check_checkpoint(folder: Path, trust_remote_code: bool = False) -> Checkpoint:
    """Loads a checkpoint, if somebody who pulls it could do so too.

    Raises:
        FileNotFoundError: A file is missing that a stranger needs, such as the model's code.
        OSError: The weights are damaged.
        ValueError: As of `load_checkpoint`, or a file is a link to one elsewhere.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder.")
    _check_links(folder)
    model, tokenizer = load_checkpoint(str(folder), trust_remote_code=trust_remote_code)
    needed = {*CODE, "checksums.json", "generation_config.json", "tokenizer.json"}
    if missing := sorted(name for name in needed if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: load the model and save it again.")
    return Checkpoint(folder, model, tokenizer)


def score_model(checkpoint: Checkpoint, test: EvaluationSet, name: str, language: str | None = None) -> Report:
    """Translates and scores: BLEU, chrF, chrF++, TER, the paper's count and perplexity, with 95% intervals.

    Args:
        checkpoint (`Checkpoint`): Whose model translates, as its `generation_config` says.
        test (`EvaluationSet`): If it is tokenised, BLEU counts its words as they are.
        name (`str`): Of the model, for signatures.
        language (`str`, *optional*): Of the translations. Compound-split BLEU, the paper's count, knows some.
    """
    model, tokenizer, texts = checkpoint.model, checkpoint.tokenizer, test.texts
    translations = [text.replace("\n", " ") for text in translate(model, tokenizer, texts.sources)]

    def metrics(warn: bool) -> dict[str, Metric]:  # anew for each use, as `compare` needs them
        tokenize, spoken = (("none",), None) if test.tokenized else ((None,), language)
        return build_metrics(test.metrics(language), tokenize, language=spoken, warn=warn)

    figures = measure(metrics(warn=True), translations, texts.references, RESAMPLES)
    figures += perplexities(model, tokenizer, texts.sources, texts.references, RESAMPLES, name=name)
    compared = [compare(metrics(warn=False), translations, baseline, texts.references) for baseline in texts.baselines]
    empty = sum(not text.strip() for text in translations)
    return Report(name, len(translations), empty, figures, list(chain.from_iterable(compared)))


def earlier_card(folder: Path, repo_id: str, revision: str | None, keep: str | None) -> str | None:
    """The card that is there already, in the folder or in the repository.

    Args:
        folder (`Path`): Of the checkpoint.
        repo_id (`str`), revision (`str`, *optional*): The repository, which need not be there.
        keep (`str`, *optional*): "folder" or "repository": which one counts if people wrote different things in both.

    Raises:
        ValueError: They did, and it is not said which one counts.
    """
    api = HfApi()
    if revision is not None and not api.revision_exists(repo_id, revision):
        revision = None  # a new branch begins as the main one
    local, remote = _read_card(folder / CARD), None
    if api.file_exists(repo_id, CARD, revision=revision):
        remote = _read_card(Path(api.hf_hub_download(repo_id, CARD, revision=revision)))
    if local is None or remote is None:
        return remote if local is None else local
    if keep is None and written_by_hand(local) != written_by_hand(remote):
        raise ValueError(
            f"{folder / CARD} and the card in {repo_id} differ in what was written by hand: say which one to keep, "
            "--keep folder or --keep repository."
        )
    return local if keep == "folder" else remote


def _read_card(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8-sig") if path.is_file() else None


def renewed_card(
    checkpoint: Checkpoint,
    repo: str,
    card_options: CardOptions,
    earlier: str | None,
    test: EvaluationSet | None = None,
) -> tuple[str, dict[str, bytes]]:
    """The card, laid under what people wrote in the earlier one, and the files that go with it.

    Args:
        checkpoint (`Checkpoint`): What the card is about.
        repo (`str`): Where the model is to be found.
        card_options (`CardOptions`): What the publisher says. Licence and languages default to the earlier card's or
            the run's.
        earlier (`str`, *optional*): The card that is there.
        test (`EvaluationSet`, *optional*): To be translated and scored.

    Raises:
        FileNotFoundError: A run or a recipe that the publisher names is not there.
        ValueError: The run trained another model, the languages are not two, or the earlier card cannot be renewed.
    """
    given = {"license": card_options.license, "language": card_options.languages, "datasets": card_options.datasets}
    before = metadata(earlier) if earlier else {}
    run = find_run(checkpoint.folder, checkpoint.model.config, card_options.run, card_options.recipe)
    known = {
        "license": card_options.license or before.get("license"),
        "languages": _languages(card_options, before, run),
    }
    card_options = replace(card_options, **known)
    if test is not None:
        card_options = _with_scores(checkpoint, repo, card_options, test)
    card_options = replace(card_options, example=card_options.example or first_source(run))
    card, files = write_card(checkpoint.folder, checkpoint.model, checkpoint.tokenizer, repo, card_options, run)
    asked = {key for key, value in given.items() if value is not None}
    text = merge(earlier, card, weights_of(checkpoint.folder), asked) if earlier else f"{card}\n"
    if not shows_curves(text):
        files.pop(CURVES, None)  # a picture of that name would be somebody's own
    return text, files


def _languages(card_options: CardOptions, before: dict, run: Run) -> list[str] | None:
    """Source and target, as the publisher, the earlier card or the run has them."""
    if card_options.languages is not None:
        if len(card_options.languages) != 2:
            found = " ".join(card_options.languages)
            raise ValueError(f"--languages: expected source and target, as in: en de; got {found}.")
        return card_options.languages
    if isinstance(known := before.get("language"), list) and len(known) == 2:
        return known
    return [run.values["source_lang"], run.values["target_lang"]] if run.values else None


def _with_scores(checkpoint: Checkpoint, repo: str, card_options: CardOptions, test: EvaluationSet) -> CardOptions:
    """The card_options, with the scores of a test set that is translated now."""
    target = card_options.languages[1] if card_options.languages else None
    return replace(
        card_options,
        reports={**card_options.reports, test.name: score_model(checkpoint, test, repo, target)},
        score_commands={**card_options.score_commands, test.name: test.command(repo, target)},
        example=card_options.example or test.texts.sources[0],
    )


def publish(
    folder: str,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload the model",
    card_options: CardOptions | None = None,
    keep: str | None = None,
    test: EvaluationSet | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Push a checkpoint with its card in one commit. What is on the Hub already is not sent again.

    Args:
        folder (`str`): Checkpoint folder; nothing is written there.
        repo_id (`str`): Repository, `user/name`; made if it is not there.
        private (`bool`, *optional*): Whether a new repository is private.
        revision (`str`, *optional*): Branch to push to, made if it is not there; the main one when not given.
        message (`str`): Of the commit.
        card_options (`CardOptions`, *optional*): What is to stand in the card and no run records.
        keep (`str`, *optional*): See `earlier_card`.
        test (`EvaluationSet`, *optional*): To be translated and scored.
        trust_remote_code (`bool`): As of `load_checkpoint`.

    Returns:
        The commit's address.

    Raises:
        FileNotFoundError: The folder lacks something that a stranger needs.
        ValueError: The card that is there cannot be renewed.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses; nothing is changed there.
    """
    checkpoint = check_checkpoint(Path(folder), trust_remote_code)
    earlier = earlier_card(Path(folder), repo_id, revision, keep)
    card, files = renewed_card(checkpoint, repo_id, card_options or CardOptions(), earlier, test)
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    operations = _operations(
        Path(folder), {**files, CARD: card.encode()}, api.list_repo_files(repo_id, revision=revision)
    )
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision).commit_url


def _operations(
    folder: Path, written: dict[str, bytes], there: list[str]
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Adds the checkpoint's files and what is written for it, and deletes what is left of an earlier model."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_of(path.name, WEIGHTS, NAMES)]
    uploads = {path.name: path for path in paths} | written
    ours = re.compile(rf"{re.escape(EVENTS)}\.\d+")
    left = (name for name in there if _is_of(name, WEIGHTS, RECORDS) or ours.fullmatch(name))
    stale = [name for name in left if name not in uploads]
    added = [CommitOperationAdd(name, content) for name, content in uploads.items()]
    return added + [CommitOperationDelete(name) for name in stale]


def _is_of(name: str, patterns: list[str], names: list[str]) -> bool:
    return name in names or any(re.fullmatch(pattern, name, re.ASCII) for pattern in patterns)


def _check_links(folder: Path) -> None:
    """Raises ValueError for a link by which a file from elsewhere would be published.

    The Hub's own cache is made of links, to its `blobs`.
    """
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        inside.append(folder.resolve().parents[1] / "blobs")
    for path in sorted(folder.iterdir()):
        if not (path.is_symlink() and _is_of(path.name, WEIGHTS, [*NAMES, *RECORDS, CARD])):
            continue
        if not any(path.resolve().is_relative_to(place) for place in inside):
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside of the checkpoint: it is not published. Put the file "
                "itself there if it belongs to the model."
            )


def write_card_only(
    folder: str,
    output: str,
    repo: str,
    card_options: CardOptions | None = None,
    test: EvaluationSet | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the card, and the picture in it, to a folder; nothing is pushed.

    Args:
        folder (`str`): Checkpoint folder.
        output (`str`): Where the card goes; one that is there is renewed.
        repo (`str`): Where the model is to be found, `user/name`.
        card_options, test, trust_remote_code: As of `publish`.
    """
    checkpoint = check_checkpoint(Path(folder), trust_remote_code)
    card, files = renewed_card(checkpoint, repo, card_options or CardOptions(), _read_card(Path(output) / CARD), test)
    Path(output).mkdir(parents=True, exist_ok=True)
    for name, content in {CARD: card.encode(), **files}.items():
        if name in (CARD, CURVES):
            with written_whole(Path(output) / name) as file:  # what people wrote is never half gone
                file.write(content)
    return Path(output) / CARD
