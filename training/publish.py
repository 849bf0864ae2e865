"""Push a checkpoint to the Hub: weights, tokenizer, code, log, and a model card that is written from the run.

The card's generated sections are renewed each time; what people wrote in it stays. --card-only writes the card alone,
and pushes nothing.
"""

import argparse
import re
import shlex
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from sacrebleu.metrics.base import Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_vaswani
from hf_vaswani import VaswaniForConditionalGeneration

from .average import RECORD as AVERAGE_RECORD
from .checkpoints import STATE_NAME
from .compound_split import LANGUAGES
from .evaluation_data import Texts, read_texts
from .event_files import NAME as EVENTS
from .metrics import DEFAULT_METRICS, build_metrics, compare, measure
from .model_card import (
    CURVES,
    Wishes,
    merge,
    metadata,
    read_report,
    shows_curves,
    weights_of,
    write_card,
    written_by_hand,
)
from .perplexity import perplexities
from .run_facts import Run, find_run, first_source
from .safe_trainer import RECORD_NAME
from .score_report import Report
from .translate import above_zero, load_checkpoint, translate


CARD = "README.md"
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
CODE = sorted(path.name for path in Path(hf_vaswani.__file__).parent.glob("*_vaswani.py"))
# What makes a checkpoint; not the optimiser's state and other pickles that the Trainer leaves beside it.
FILES = [
    *WEIGHTS,
    *CODE,
    "checksums.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
RECORDS = [STATE_NAME, RECORD_NAME, AVERAGE_RECORD]  # written by `write_card`, without paths
RESAMPLES = 1000


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and the model and tokenizer in it."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class TestSet:
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


def check_checkpoint(folder: Path) -> Checkpoint:
    """Loads a checkpoint, if somebody who pulls it could do so too.

    Raises:
        FileNotFoundError: A file is missing that a stranger needs, such as the model's code.
        OSError: The weights are damaged.
        ValueError: The tokenizer does not belong to the model, or the weights are not all there.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder.")
    model, tokenizer = load_checkpoint(str(folder))
    _, report = VaswaniForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    if wrong := {name: sorted(keys) for name, keys in report.items() if keys}:
        raise ValueError(f"{folder}: the weights do not fit the model: {wrong}.")
    needed = {*CODE, "checksums.json", "generation_config.json", "tokenizer.json"}
    if missing := sorted(name for name in needed if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: load the model and save it again.")
    return Checkpoint(folder, model, tokenizer)


def score_model(checkpoint: Checkpoint, test: TestSet, name: str, language: str | None = None) -> Report:
    """Translates and scores: BLEU, chrF, chrF++, TER, the paper's count and perplexity, with 95% intervals.

    Args:
        checkpoint (`Checkpoint`): Whose model translates, as its `generation_config` says.
        test (`TestSet`): If it is tokenised, BLEU counts its words as they are.
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
    checkpoint: Checkpoint, repo: str, wishes: Wishes, earlier: str | None, test: TestSet | None = None
) -> tuple[str, dict[str, bytes]]:
    """The card, laid under what people wrote in the earlier one, and the files that go with it.

    Args:
        checkpoint (`Checkpoint`): What the card is about.
        repo (`str`): Where the model is to be found.
        wishes (`Wishes`): What the publisher says; licence and languages are the earlier card's or the run's
            when not given.
        earlier (`str`, *optional*): The card that is there.
        test (`TestSet`, *optional*): To be translated and scored.

    Raises:
        FileNotFoundError: A run or a recipe that the publisher names is not there.
        ValueError: The run trained another model, the languages are not two, or the earlier card cannot be renewed.
    """
    given = {"license": wishes.license, "language": wishes.languages, "datasets": wishes.datasets}
    before = metadata(earlier) if earlier else {}
    run = find_run(checkpoint.folder, checkpoint.model.config, wishes.run, wishes.recipe)
    known = {"license": wishes.license or before.get("license"), "languages": _languages(wishes, before, run)}
    wishes = replace(wishes, **known)
    if test is not None:
        wishes = _with_scores(checkpoint, repo, wishes, test)
    wishes = replace(wishes, example=wishes.example or first_source(run))
    card, files = write_card(checkpoint.folder, checkpoint.model, checkpoint.tokenizer, repo, wishes, run)
    asked = {key for key, value in given.items() if value is not None}
    text = merge(earlier, card, weights_of(checkpoint.folder), asked) if earlier else f"{card}\n"
    if not shows_curves(text):
        files.pop(CURVES, None)  # a picture of that name would be somebody's own
    return text, files


def _languages(wishes: Wishes, before: dict, run: Run) -> list[str] | None:
    """Source and target, as the publisher, the earlier card or the run has them."""
    if wishes.languages is not None:
        if len(wishes.languages) != 2:
            found = " ".join(wishes.languages)
            raise ValueError(f"--languages: expected source and target, as in: en de; got {found}.")
        return wishes.languages
    if isinstance(known := before.get("language"), list) and len(known) == 2:
        return known
    return [run.values["source_lang"], run.values["target_lang"]] if run.values else None


def _with_scores(checkpoint: Checkpoint, repo: str, wishes: Wishes, test: TestSet) -> Wishes:
    """The wishes, with the scores of a test set that is translated now."""
    target = wishes.languages[1] if wishes.languages else None
    return replace(
        wishes,
        reports={**wishes.reports, test.name: score_model(checkpoint, test, repo, target)},
        score_commands={**wishes.score_commands, test.name: test.command(repo, target)},
        example=wishes.example or test.texts.sources[0],
    )


def publish(
    folder: str,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload the model",
    wishes: Wishes | None = None,
    keep: str | None = None,
    test: TestSet | None = None,
) -> str:
    """Push a checkpoint with its card in one commit. What is on the Hub already is not sent again.

    Args:
        folder (`str`): Checkpoint folder; nothing is written there.
        repo_id (`str`): Repository, `user/name`; made if it is not there.
        private (`bool`, *optional*): Whether a new repository is private.
        revision (`str`, *optional*): Branch to push to, made if it is not there; the main one when not given.
        message (`str`): Of the commit.
        wishes (`Wishes`, *optional*): What is to stand in the card and no run records.
        keep (`str`, *optional*): See `earlier_card`.
        test (`TestSet`, *optional*): To be translated and scored.

    Returns:
        The commit's address.

    Raises:
        FileNotFoundError: The folder lacks something that a stranger needs.
        ValueError: The card that is there cannot be renewed.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses; nothing is changed there.
    """
    checkpoint = check_checkpoint(Path(folder))
    earlier = earlier_card(Path(folder), repo_id, revision, keep)
    card, files = renewed_card(checkpoint, repo_id, wishes or Wishes(), earlier, test)
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
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and _matches(path.name, FILES)]
    uploads = {path.name: path for path in paths} | written
    ours = re.compile(rf"{re.escape(EVENTS)}\.\d+")
    left = (name for name in there if _matches(name, [*WEIGHTS, *RECORDS]) or ours.fullmatch(name))
    stale = [name for name in left if name not in uploads]
    added = [CommitOperationAdd(name, content) for name, content in uploads.items()]
    return added + [CommitOperationDelete(name) for name in stale]


def _matches(name: str, patterns: list[str]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def write_card_only(
    folder: str,
    output: str,
    repo: str,
    wishes: Wishes | None = None,
    test: TestSet | None = None,
) -> Path:
    """Write the card, and the picture in it, to a folder; nothing is pushed.

    Args:
        folder (`str`): Checkpoint folder.
        output (`str`): Where the card goes; one that is there is renewed.
        repo (`str`): Where the model is to be found, `user/name`.
        wishes, test: As of `publish`.
    """
    checkpoint = check_checkpoint(Path(folder))
    card, files = renewed_card(checkpoint, repo, wishes or Wishes(), _read_card(Path(output) / CARD), test)
    Path(output).mkdir(parents=True, exist_ok=True)
    for name, content in {CARD: card.encode(), **files}.items():
        if name in (CARD, CURVES):
            partial = Path(output) / f"{name}.partial"
            partial.write_bytes(content)
            partial.replace(Path(output) / name)  # what people wrote is never half gone
    return Path(output) / CARD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-vaswani publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="checkpoint folder")
    add("--repo", help="repository on the Hub, user/name; made if it is not there")
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--revision", help="branch to push to (main)")
    add("--message", default="Upload the model", help="of the commit (%(default)s)")
    add("--card-only", nargs="?", const="", metavar="FOLDER", help="push nothing: write the card (to the checkpoint)")
    add("--keep", choices=("folder", "repository"), help="whose card, if people wrote different things in both")

    card = parser.add_argument_group("what the card says and no run records")
    card.add_argument("--license", type=license_identifier, help="of the weights, as the Hub calls it: cc-by-4.0 "
        "(unknown)")  # fmt: skip
    card.add_argument("--languages", nargs=2, metavar=("SOURCE", "TARGET"), help="en de (the run's)")
    card.add_argument("--datasets", nargs="+", help="names on the Hub (the run's)")
    card.add_argument("--run", help="folder of the run (the one that the checkpoint lies in)")
    card.add_argument("--recipe", help="path or name of the recipe, for a run without run.json")
    card.add_argument("--hardware", help="what it was trained on: '8 x P100' (what the run recorded)")
    card.add_argument("--watts", type=above_zero, help="what that drew on average, for an estimate of the energy")
    card.add_argument("--example", help="sentence to translate in the card (the first test source, or the first "
        "that the run was evaluated on, if its file is there unchanged)")  # fmt: skip

    scores = parser.add_argument_group(
        "scores", "Scores of other test sets stay in the card, as long as the weights are the same."
    )
    scores.add_argument("--test-sources", help="text file to translate and score, a sentence a line, plain or .gz")
    scores.add_argument("--test-references", nargs="+", help="its references")
    scores.add_argument("--baseline", nargs="+", default=[], metavar="FILE", help="translations of these sources by "
        "other systems, to test against")  # fmt: skip
    scores.add_argument("--tokenized", action="store_true", help="they are already tokenised: tokenised BLEU")
    scores.add_argument("--scores", nargs="+", default=[], metavar="FILE", help="what `hf-vaswani score --json` "
        "printed, in a file with the name of the test set")  # fmt: skip
    return parser


def license_identifier(text: str) -> str:
    """A licence, for argparse: the form of the Hub's identifiers, of which no list is to be had offline."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", text):
        raise argparse.ArgumentTypeError(
            "expected an identifier of the Hub, of lowercase letters, digits, dots and dashes, as in cc-by-4.0, "
            f"got {text!r}"
        )
    return text


def _test_name(file: str) -> str:
    """`test_2016_flickr` of `data/test_2016_flickr.de.gz`."""
    return Path(file).name.removesuffix(".gz").split(".")[0]


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani publish`."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.repo is None and args.card_only is None:
        parser.error("give --repo, or --card-only")
    if bool(args.test_sources) != bool(args.test_references):
        parser.error("--test-sources and --test-references go together")
    if args.baseline and not args.test_sources:
        parser.error("--baseline needs --test-sources")
    names = ("license", "languages", "datasets", "run", "recipe", "hardware", "watts", "example")
    wishes = Wishes(**{name: vars(args)[name] for name in names})
    wishes.reports = {Path(file).stem: read_report(file) for file in args.scores}
    repo, test = args.repo or f"user/{Path(args.checkpoint).resolve().name}", None
    if args.test_sources:
        texts = read_texts(None, args.test_references, args.test_sources, args.baseline)
        texts.baselines = [(Path(file).name, lines) for file, lines in texts.baselines]
        files = [args.test_sources, *args.test_references]
        test = TestSet(_test_name(args.test_sources), texts, files, args.tokenized)
    if args.card_only is not None:
        print(write_card_only(args.checkpoint, args.card_only or args.checkpoint, repo, wishes, test))
        return
    print(publish(args.checkpoint, repo, args.private, args.revision, args.message, wishes, args.keep, test))


if __name__ == "__main__":
    main()
