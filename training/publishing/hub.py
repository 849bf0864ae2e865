"""Push a checkpoint to the Hub, with a model card written from its run or an existing card updated in place."""

import re
import shlex
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from sacrebleu.metrics.base import Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_vaswani

from ..data.tokenizer import symbol_ids
from ..data.treebanks import parse_lines
from ..data.two_sided_tokenizer import TARGET_TOKENIZER
from ..evaluation.choices import BRACKETING, DEFAULT_METRICS, LANGUAGES
from ..evaluation.metrics import build_metrics, compare, measure
from ..evaluation.perplexity import perplexities
from ..evaluation.report import Report
from ..evaluation.test_sets import Texts
from ..files import written_whole
from ..hub_connection import hub_failure
from ..inference.loading import load_checkpoint
from ..inference.origin import ORIGIN
from ..inference.parsing import parse
from ..inference.translation import translate
from ..trainer.averaging import RECORD as AVERAGE_RECORD
from ..trainer.checkpoints import STATE_NAME
from ..trainer.resumable_trainer import MANIFEST_NAME
from .model_card import (
    CURVES,
    DIRECTION,
    UNKNOWN_LICENSE,
    CardOptions,
    merge,
    metadata,
    shows_curves,
    weights_of,
    write_card,
    written_by_hand,
)
from .records import Run, find_run, first_source
from .tensorboard_log import NAME as EVENTS


CARD = "README.md"
WEIGHTS = [r"model[\w.-]*\.safetensors", r"model\.safetensors\.index\.json"]
CODE = sorted(path.name for path in Path(hf_vaswani.__file__).parent.glob("*_vaswani.py"))
# Files of a checkpoint. The optimiser state and the other pickles that the Trainer writes stay unpublished.
NAMES = [*CODE, "checksums.json", "config.json", "generation_config.json"]
NAMES += ["tokenizer.json", "tokenizer_config.json", TARGET_TOKENIZER]
RECORDS = [STATE_NAME, MANIFEST_NAME, AVERAGE_RECORD, ORIGIN]  # published by `write_card`, with paths removed
RESAMPLES = 1000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with its loaded model and tokenizer."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def is_parser(self) -> bool:
        """Whether the model writes trees."""
        return bool(symbol_ids(self.tokenizer))


@dataclass(frozen=True)
class EvaluationSet:
    """Test set to translate and score.

    Attributes:
        name (`str`): Name of the test set.
        texts (`Texts`): Sources, references and baseline translations.
        files (`list[str]`): File of the sources, followed by the files of the references; for a parser, by the file
            of the gold trees.
        tokenized (`bool`): The text is already tokenised.
    """

    name: str
    texts: Texts
    files: list[str]
    tokenized: bool = False

    def metrics(self, language: str | None, is_parser: bool = False) -> tuple[str, ...]:
        """Metrics to compute; compound-split BLEU, the paper's metric, is included for the languages it supports."""
        if is_parser:
            return (BRACKETING,)
        return (*DEFAULT_METRICS, "compound-bleu") if language in LANGUAGES else DEFAULT_METRICS

    def command(self, model: str, language: str | None, is_parser: bool = False) -> str:
        """Command line that reproduces the scores."""
        sources, *references = (Path(file).name for file in self.files)
        argv = ["hf-vaswani", "score", "--model", model, "--sources", sources, "--references", *references]
        argv += ["--tokenized"] if self.tokenized else []
        argv += ["--baseline", *(name for name, _ in self.texts.baselines)] if self.texts.baselines else []
        if is_parser:
            argv += ["--metrics", BRACKETING]
        elif language in LANGUAGES:
            argv += ["--metrics", *self.metrics(language)] + ([] if self.tokenized else ["--language", language])
        return shlex.join([*argv, "--bootstrap"])


def check_checkpoint(folder: Path, trust_remote_code: bool = False) -> Checkpoint:
    """Load a checkpoint and check that it is complete for download by others.

    Raises:
        FileNotFoundError: The folder or a file that loading from the Hub needs is missing, such as the model's code.
        OSError: The weights are damaged.
        ValueError: `load_checkpoint` refuses the checkpoint, or a file is a symbolic link to outside the folder.
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
    """Translate and score a test set: BLEU, chrF, chrF++, TER, compound-split BLEU and perplexity, with 95% intervals.
    A parser parses it, and its score is bracketing F1.

    Args:
        checkpoint (`Checkpoint`): Model that translates or parses, with the settings of its `generation_config`.
        test (`EvaluationSet`): Test set. BLEU keeps the tokenisation of a tokenised one.
        name (`str`): Name of the model for signatures.
        language (`str`, *optional*): Target language. Compound-split BLEU, the paper's metric, needs one of
            `LANGUAGES`.

    Raises:
        DataError: A gold tree is malformed, or a sentence too long for the parser.
        ValueError: The test set does not suit a parser.
    """
    model, tokenizer, texts, is_parser = checkpoint.model, checkpoint.tokenizer, test.texts, checkpoint.is_parser
    if is_parser:
        _check_trees(test)
        outputs = parse(model, tokenizer, texts.sources, file=test.files[0])
    else:
        outputs = [text.replace("\n", " ") for text in translate(model, tokenizer, texts.sources)]

    def metrics(warn: bool) -> dict[str, Metric]:  # `compare` needs metrics that computed no intervals before
        tokenize, split_language = (("none",), None) if test.tokenized else ((None,), language)
        return build_metrics(test.metrics(language, is_parser), tokenize, language=split_language, warn=warn)

    figures = measure(metrics(warn=True), outputs, texts.references, RESAMPLES)
    if not is_parser:
        figures += perplexities(model, tokenizer, texts.sources, texts.references, RESAMPLES, name=name)
    compared = [compare(metrics(warn=False), outputs, baseline, texts.references) for baseline in texts.baselines]
    empty = sum(not text.strip() for text in outputs)
    return Report(name, len(outputs), empty, figures, list(chain.from_iterable(compared)))


def _check_trees(test: EvaluationSet) -> None:
    """Raise ValueError unless a parser can be scored on the test set."""
    _, gold, *more = test.files
    if more:
        raise ValueError(f"--test-references: expected one file of trees for a parser, found {len(more) + 1} files.")
    if test.tokenized:
        raise ValueError("--tokenized is about BLEU, and the model is a parser.")
    parse_lines(gold, test.texts.references[0])


def earlier_card(folder: Path, repo_id: str, revision: str | None, keep: str | None) -> str | None:
    """Existing card of the checkpoint, from its folder or from the repository; `None` if there is none.

    Args:
        folder (`Path`): Checkpoint folder.
        repo_id (`str`), revision (`str`, *optional*): Repository and branch, which need not exist.
        keep (`str`, *optional*): Card to use if the handwritten parts of the two differ: "folder" or "repository".

    Raises:
        ValueError: The handwritten parts differ and `keep` is not given.
    """
    api = HfApi()
    if revision is not None and not api.revision_exists(repo_id, revision):
        revision = None  # a new branch starts from the main one
    local, remote = _read_card(folder / CARD), None
    if api.file_exists(repo_id, CARD, revision=revision):
        remote = _read_card(Path(api.hf_hub_download(repo_id, CARD, revision=revision)))
    if local is None or remote is None:
        return remote if local is None else local
    if keep is None and written_by_hand(local) != written_by_hand(remote):
        raise ValueError(
            f"{folder / CARD} and the card in {repo_id} differ in their handwritten text: choose the one to keep with "
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
    """Card of a checkpoint, merged into the handwritten text of an earlier one, and the files published with it.

    Args:
        checkpoint (`Checkpoint`): Checkpoint that the card describes.
        repo (`str`): Repository of the model, `user/name`.
        card_options (`CardOptions`): Facts from the publisher. Licence and languages default to those of the earlier
            card or of the run.
        earlier (`str`, *optional*): Existing card.
        test (`EvaluationSet`, *optional*): Test set to translate and score.

    Raises:
        FileNotFoundError: The publisher's run or recipe does not exist.
        ValueError: The run trained another model, the number of languages is not two, or the earlier card is
            malformed.
    """
    options = {"license": card_options.license, "language": card_options.languages, "datasets": card_options.datasets}
    before = metadata(earlier) if earlier else {}
    run = find_run(checkpoint.folder, checkpoint.model.config, card_options.run, card_options.recipe)
    kept = before.get("license") if before.get("license") != UNKNOWN_LICENSE else None
    card_options = replace(
        card_options,
        license=card_options.license or kept,
        languages=_languages(card_options, before, run, earlier or ""),
    )
    if test is not None:
        card_options = _with_scores(checkpoint, repo, card_options, test)
    card_options = replace(card_options, example=card_options.example or first_source(run))
    card, files = write_card(checkpoint.folder, checkpoint.model, checkpoint.tokenizer, repo, card_options, run)
    given = {key for key, value in options.items() if value is not None} | _renewed_facts(before, card.data.to_dict())
    text = merge(earlier, card, weights_of(checkpoint.folder), given) if earlier else f"{card}\n"
    if not shows_curves(text):
        files.pop(CURVES, None)  # a picture of that name in the repository belongs to its author
    return text, files


def _renewed_facts(before: dict, now: dict) -> set[str]:
    """Metadata keys whose generated values have changed: a licence unknown before, another relation to one base."""
    keys = {"license"} if before.get("license") == UNKNOWN_LICENSE else set()
    return keys | ({"base_model_relation"} if before.get("base_model") == now.get("base_model") else set())


def _languages(card_options: CardOptions, before: dict, run: Run, earlier: str) -> list[str] | None:
    """Source and target language, from the publisher, the earlier card or the run, in this order.

    The languages of a converted model may come from its original, whose card gives them in any order. They are source
    and target only if the earlier card translates from one to the other.
    """
    if card_options.languages is not None:
        if len(card_options.languages) != 2:
            languages = " ".join(card_options.languages)
            raise ValueError(f"--languages: expected source and target, as in: en de; got {languages}.")
        return card_options.languages
    languages = before.get("language")
    is_ordered = not run.is_converted or languages != run.origin.get("languages") or DIRECTION in earlier
    if isinstance(languages, list) and len(languages) == 2 and is_ordered:
        return languages
    return [run.values["source_lang"], run.values["target_lang"]] if run.values else None


def _with_scores(checkpoint: Checkpoint, repo: str, card_options: CardOptions, test: EvaluationSet) -> CardOptions:
    """Translate and score a test set, and add the scores to the options."""
    target = card_options.languages[1] if card_options.languages else None
    return replace(
        card_options,
        reports={**card_options.reports, test.name: score_model(checkpoint, test, repo, target)},
        score_commands={**card_options.score_commands, test.name: test.command(repo, target, checkpoint.is_parser)},
        example=card_options.example or test.texts.sources[0],
    )


def check_connection() -> None:
    """Raise OSError unless the Hub answers and there is a token to push with."""
    if (failure := hub_failure()) is not None:
        raise ConnectionError(f"{failure}: publishing needs the Hub. --card-only writes the card without it.")
    if get_token() is None:
        raise PermissionError("No token for the Hub: run `hf auth login`, or set HF_TOKEN.")


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
    """Push a checkpoint with its card in one commit. Files that the Hub already has are not uploaded again.

    Args:
        folder (`str`): Checkpoint folder, which is not modified.
        repo_id (`str`): Repository, `user/name`; created if it does not exist.
        private (`bool`, *optional*): Make a new repository private.
        revision (`str`, *optional*): Branch to push to, created if it does not exist; the main branch when not given.
        message (`str`): Commit message.
        card_options (`CardOptions`, *optional*): Facts for the card that no run records.
        keep (`str`, *optional*): See `earlier_card`.
        test (`EvaluationSet`, *optional*): Test set to translate and score.
        trust_remote_code (`bool`): See `load_checkpoint`.

    Returns:
        The URL of the commit.

    Raises:
        FileNotFoundError: The folder lacks a file that loading from the Hub needs.
        ValueError: The existing card is malformed.
        OSError: The Hub does not answer, there is no token, or the Hub refuses the request.
    """
    check_connection()
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
    folder: Path, generated: dict[str, bytes], remote_files: list[str]
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Operations that add the checkpoint's and the generated files, and delete stale files of an earlier model."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_of(path.name, WEIGHTS, NAMES)]
    uploads = {path.name: path for path in paths} | generated
    own_events = re.compile(rf"{re.escape(EVENTS)}\.\d+")
    replaceable = (name for name in remote_files if _is_of(name, WEIGHTS, RECORDS) or own_events.fullmatch(name))
    stale = [name for name in replaceable if name not in uploads]
    added = [CommitOperationAdd(name, content) for name, content in uploads.items()]
    return added + [CommitOperationDelete(name) for name in stale]


def _is_of(name: str, patterns: list[str], names: list[str]) -> bool:
    return name in names or any(re.fullmatch(pattern, name, re.ASCII) for pattern in patterns)


def _check_links(folder: Path) -> None:
    """Raise ValueError for a symbolic link that would publish a file from outside the checkpoint.

    Links within the Hub's cache, from `snapshots` to `blobs`, are allowed.
    """
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        inside.append(folder.resolve().parents[1] / "blobs")
    for path in sorted(folder.iterdir()):
        if not (path.is_symlink() and _is_of(path.name, WEIGHTS, [*NAMES, *RECORDS, CARD])):
            continue
        if not any(path.resolve().is_relative_to(parent) for parent in inside):
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside of the checkpoint: it is not published. If the file "
                "belongs to the model, replace the link by the file itself."
            )


def write_card_only(
    folder: str,
    output: str,
    repo: str,
    card_options: CardOptions | None = None,
    test: EvaluationSet | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the card and its picture to a folder, without a push.

    Args:
        folder (`str`): Checkpoint folder.
        output (`str`): Folder to write to; an existing card in it is updated.
        repo (`str`): Repository of the model, `user/name`.
        card_options, test, trust_remote_code: See `publish`.
    """
    checkpoint = check_checkpoint(Path(folder), trust_remote_code)
    card, files = renewed_card(checkpoint, repo, card_options or CardOptions(), _read_card(Path(output) / CARD), test)
    Path(output).mkdir(parents=True, exist_ok=True)
    for name, content in {CARD: card.encode(), **files}.items():
        if name in (CARD, CURVES):
            with written_whole(Path(output) / name) as file:  # handwritten text must survive a crash
                file.write(content)
    return Path(output) / CARD
