"""Push a checkpoint to the Hub: weights, tokenizer, code, log, and a model card that is written from the run.

The card's generated sections are renewed each time; what people wrote in it stays. --card-only writes the card alone,
and pushes nothing.
"""

import argparse
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_vaswani
from hf_vaswani import VaswaniForConditionalGeneration

from .average import RECORD as AVERAGE_RECORD
from .checkpoints import STATE_NAME
from .evaluation_data import Texts, read_texts
from .metrics import build_metrics, measure
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
    """Sources and references to be translated and scored; whether they are tokenised already."""

    name: str
    texts: Texts
    tokenized: bool = False


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


def score_model(checkpoint: Checkpoint, test: TestSet, name: str) -> Report:
    """Translates and scores: BLEU, chrF, chrF++, TER and perplexity, with 95% intervals.

    Args:
        checkpoint (`Checkpoint`): Whose model translates, as its `generation_config` says.
        test (`TestSet`): If it is tokenised, BLEU counts its words as they are.
        name (`str`): Of the model, for signatures.
    """
    model, tokenizer, texts = checkpoint.model, checkpoint.tokenizer, test.texts
    translations = [text.replace("\n", " ") for text in translate(model, tokenizer, texts.sources)]
    metrics = build_metrics(tokenize=("none",) if test.tokenized else (None,), language=None)
    figures = measure(metrics, translations, texts.references, RESAMPLES)
    figures += perplexities(model, tokenizer, texts.sources, texts.references, RESAMPLES, name=name)
    return Report(name, len(translations), sum(not text.strip() for text in translations), figures)


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
    checkpoint: Checkpoint, repo: str, wishes: Wishes, earlier: str | None
) -> tuple[str, dict[str, bytes]]:
    """The card, laid under what people wrote in the earlier one, and the files that go with it.

    Args:
        checkpoint (`Checkpoint`): What the card is about.
        repo (`str`): Where the model is to be found.
        wishes (`Wishes`): What the publisher says; licence and languages are the earlier card's when not given.
        earlier (`str`, *optional*): The card that is there.
    """
    given = {"license": wishes.license, "language": wishes.languages, "datasets": wishes.datasets}
    before = metadata(earlier) if earlier else {}
    if wishes.license is None:
        wishes = replace(wishes, license=before.get("license"))
    if wishes.languages is None and isinstance(before.get("language"), list) and len(before["language"]) == 2:
        wishes = replace(wishes, languages=before["language"])
    card, files = write_card(checkpoint.folder, checkpoint.model, checkpoint.tokenizer, repo, wishes)
    asked = {key for key, value in given.items() if value is not None}
    text = merge(earlier, card, weights_of(checkpoint.folder), asked) if earlier else f"{card}\n"
    if not shows_curves(text):
        files.pop(CURVES, None)  # a picture of that name would be somebody's own
    return text, files


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
    wishes = with_scores(checkpoint, repo_id, wishes or Wishes(), test)
    card, files = renewed_card(checkpoint, repo_id, wishes, earlier)
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
    stale = [name for name in there if name not in uploads and _matches(name, [*WEIGHTS, *RECORDS])]
    added = [CommitOperationAdd(name, content) for name, content in uploads.items()]
    return added + [CommitOperationDelete(name) for name in stale]


def _matches(name: str, patterns: list[str]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def with_scores(
    checkpoint: Checkpoint,
    repo: str,
    wishes: Wishes,
    test: TestSet | None,
) -> Wishes:
    """The wishes, with the scores of a test set that is translated now."""
    if test is None:
        return wishes
    reports = {**wishes.reports, test.name: score_model(checkpoint, test, repo)}
    return replace(wishes, reports=reports, example=wishes.example or test.texts.sources[0])


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
    wishes = with_scores(checkpoint, repo, wishes or Wishes(), test)
    card, files = renewed_card(checkpoint, repo, wishes, _read_card(Path(output) / CARD))
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
    card.add_argument("--license", help="of the weights, as the Hub calls it: cc-by-4.0 (unknown)")
    card.add_argument("--languages", nargs=2, metavar=("SOURCE", "TARGET"), help="en de (the run's)")
    card.add_argument("--datasets", nargs="+", help="names on the Hub (the run's)")
    card.add_argument("--run", help="folder of the run (the one that the checkpoint lies in)")
    card.add_argument("--recipe", help="path or name of the recipe, for a run without run.json")
    card.add_argument("--hardware", help="what it was trained on: '8 x P100'")
    card.add_argument("--watts", type=above_zero, help="what that drew on average, for an estimate of the energy")
    card.add_argument("--example", help="sentence to translate in the card (the first test source)")

    scores = parser.add_argument_group("scores")
    scores.add_argument("--test-sources", help="text file to translate and score, a sentence a line, plain or .gz")
    scores.add_argument("--test-references", nargs="+", help="its references")
    scores.add_argument("--tokenized", action="store_true", help="they are already tokenised: tokenised BLEU")
    scores.add_argument("--scores", nargs="+", default=[], metavar="FILE", help="what `hf-vaswani score --json` "
        "printed, in a file with the name of the test set")  # fmt: skip
    return parser


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
    names = ("license", "languages", "datasets", "run", "recipe", "hardware", "watts", "example")
    wishes = Wishes(**{name: vars(args)[name] for name in names})
    wishes.reports = {Path(file).stem: read_report(file) for file in args.scores}
    repo, test = args.repo or f"user/{Path(args.checkpoint).resolve().name}", None
    if args.test_sources:
        texts = read_texts(None, args.test_references, args.test_sources, [])
        test = TestSet(_test_name(args.test_sources), texts, args.tokenized)
        files = [Path(args.test_sources).name, *(Path(file).name for file in args.test_references)]
        options = f"--sources {files[0]} --references {' '.join(files[1:])}{' --tokenized' * args.tokenized}"
        wishes.score_command = f"hf-vaswani score --model {repo} {options} --bootstrap"
    if args.card_only is not None:
        print(write_card_only(args.checkpoint, args.card_only or args.checkpoint, repo, wishes, test))
        return
    print(publish(args.checkpoint, repo, args.private, args.revision, args.message, wishes, args.keep, test))


if __name__ == "__main__":
    main()
