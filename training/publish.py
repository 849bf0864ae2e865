"""Push a checkpoint to the Hub: weights, tokenizer, code, log, and a model card that is written from the run.

The card's generated sections are renewed each time; what people wrote in it stays. --card-only writes the card alone,
and pushes nothing.
"""

import argparse
import re
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .evaluation.test_sets import read_texts
from .files import check_output, check_output_folder
from .options import above_zero, add_trust
from .publishing.hub import CARD, EvaluationSet, publish, write_card_only
from .publishing.model_card import CURVES, CardOptions
from .publishing.scores import read_report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-vaswani publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="checkpoint folder")
    add("--repo", type=repository, help="repository on the Hub, user/name; made if it is not there")
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--revision", help="branch to push to (main)")
    add("--message", default="Upload the model", help="of the commit (%(default)s)")
    add("--card-only", nargs="?", const="", metavar="FOLDER", help="push nothing: write the card (to the checkpoint)")
    add("--keep", choices=("folder", "repository"), help="whose card, if people wrote different things in both")
    add_trust(parser)

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


def repository(text: str) -> str:
    """A repository of the Hub, for argparse."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        raise argparse.ArgumentTypeError(f"expected a name of the Hub, user/name, got {text!r}") from None
    return text


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


def _check_card(args: argparse.Namespace) -> None:
    """Raises OSError or ValueError where the card, or the picture in it, cannot or must not be written."""
    folder = Path(args.card_only or args.checkpoint)
    check_output_folder(folder, "--card-only")
    read = [args.recipe, args.test_sources, *(args.test_references or []), *args.baseline, *args.scores]
    for name in (CARD, CURVES) if folder.is_dir() else ():
        check_output(folder / name, [args.checkpoint, *read], "--card-only")


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
    if args.card_only is not None:
        _check_card(args)
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
    main()
