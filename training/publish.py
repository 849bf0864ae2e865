"""Push a checkpoint to the Hub: weights, tokenizer, code, log, and a model card generated from the run.

Publishing again updates the generated sections of the card and preserves what people wrote. --card-only writes the
card and pushes nothing.
"""

import argparse
import sys
from pathlib import Path

from .files import check_output, check_output_folder
from .inference.choices import LICENSE
from .options import Parser, above_zero, add_trust
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani publish`."""
    parser = Parser(
        prog="hf-vaswani publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="checkpoint folder")
    add("--repo", type=repository, help="repository on the Hub, user/name; created if it does not exist")
    add("--private", action="store_true", default=None, help="create a new repository as private")
    add("--revision", help="branch to push to (default: main)")
    add("--message", default="Upload the model", help="commit message (default: %(default)s)")
    add("--card-only", nargs="?", const="", metavar="FOLDER", help="write the card to this folder and push nothing "
        "(the checkpoint folder if no folder is given)")  # fmt: skip
    add("--keep", choices=("folder", "repository"), help="card to keep if people edited both the card in the folder "
        "and the one in the repository (default: stop with an error)")  # fmt: skip
    add_trust(parser)

    card = parser.add_argument_group("model card", "Facts that no run records, or that replace the recorded ones.")
    card.add_argument("--license", type=license_identifier, help="licence of the weights, as an identifier of the Hub "
        "such as cc-by-4.0 (default: that of the original of a converted model, or else unknown)")  # fmt: skip
    card.add_argument("--languages", nargs=2, metavar=("SOURCE", "TARGET"), help="codes of the two languages, such as "
        "en de (default: the run's)")  # fmt: skip
    card.add_argument("--datasets", nargs="+", help="names of the training data on the Hub (default: the run's)")
    card.add_argument("--run", help="folder of the run (default: the one that contains the checkpoint)")
    card.add_argument("--recipe", help="path or name of the recipe, for a run without run.json")
    card.add_argument("--hardware", help="training hardware, such as '8 x P100' (default: what the run recorded)")
    card.add_argument("--watts", type=above_zero, help="average power of the hardware, for an estimate of the energy")
    card.add_argument("--example", help="sentence to translate in the card (default: the first test source, or else "
        "the first source of the run's evaluation data, if that file is unchanged)")  # fmt: skip

    scores = parser.add_argument_group(
        "scores", "Scores of other test sets stay in the card as long as the weights are the same."
    )
    scores.add_argument("--test-sources", help="text file to translate and score, with one sentence per line, plain "
        "or .gz")  # fmt: skip
    scores.add_argument("--test-references", nargs="+", help="files of reference translations of --test-sources")
    scores.add_argument("--baseline", nargs="+", default=[], metavar="FILE", help="translations of --test-sources by "
        "other systems, for significance tests")  # fmt: skip
    scores.add_argument("--tokenized", action="store_true", help="report tokenised BLEU, for test files that are "
        "already tokenised")  # fmt: skip
    scores.add_argument("--scores", nargs="+", default=[], metavar="FILE", help="output of `hf-vaswani score --json`, "
        "in a file named after the test set")  # fmt: skip
    return parser


def repository(text: str) -> str:
    """Parse the name of a repository on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        raise argparse.ArgumentTypeError(f"expected the name of a Hub repository, user/name, got {text!r}") from None
    return text


def license_identifier(text: str) -> str:
    """Parse a licence. Only the form is checked."""
    if not LICENSE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected a licence identifier of the Hub in lowercase letters, digits, dots, dashes and plus signs, such "
            f"as cc-by-4.0, got {text!r}"
        )
    return text


def _test_name(file: str) -> str:
    """Name of a test set by its file: `test_2016_flickr` for `data/test_2016_flickr.de.gz`."""
    return Path(file).name.removesuffix(".gz").split(".")[0]


def _check_card(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Raise OSError or ValueError if one of the files, the card and its picture, cannot or must not be written."""
    folder = Path(args.card_only or args.checkpoint)
    check_output_folder(folder, "--card-only")
    inputs = [args.checkpoint, args.recipe, args.test_sources, *(args.test_references or [])]
    for name in names if folder.is_dir() else ():
        check_output(folder / name, [*inputs, *args.baseline, *args.scores], "--card-only")


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani publish`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.repo is None and args.card_only is None:
        parser.error("give --repo or --card-only")
    if bool(args.test_sources) != bool(args.test_references):
        parser.error("--test-sources and --test-references must be given together")
    if args.baseline and not args.test_sources:
        parser.error("--baseline needs --test-sources")

    from .evaluation.test_sets import read_texts
    from .publishing.hub import CARD, EvaluationSet, publish, write_card_only
    from .publishing.model_card import CURVES, CardOptions
    from .publishing.scores import read_report

    if args.card_only is not None:
        _check_card(args, (CARD, CURVES))
    names = ("license", "languages", "datasets", "run", "recipe", "hardware", "watts", "example")
    card_options = CardOptions(**{name: vars(args)[name] for name in names})
    card_options.reports = {Path(file).stem: read_report(file) for file in args.scores}
    repo, test = args.repo or f"user/{Path(args.checkpoint).resolve().name}", None
    if args.test_sources:
        texts = read_texts(None, args.test_references, args.test_sources, args.baseline)
        texts.baselines = [(Path(file).name, lines) for file, lines in texts.baselines]
        files = [args.test_sources, *args.test_references]
        test = EvaluationSet(_test_name(args.test_sources), texts, files, args.tokenized)
    trust = args.trust_remote_code
    if args.card_only is not None:
        print(write_card_only(args.checkpoint, args.card_only or args.checkpoint, repo, card_options, test, trust))
        return
    print(
        publish(args.checkpoint, repo, args.private, args.revision, args.message, card_options, args.keep, test, trust)
    )


if __name__ == "__main__":
    sys.exit(run("publish"))
