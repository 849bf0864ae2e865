"""Score translations against references: sacreBLEU with its signature, or tokenised BLEU."""

import argparse
import json
from importlib import resources

import evaluate

from .data import DataError, check_file, read_lines


def load_bleu() -> evaluate.EvaluationModule:
    """The BLEU module that ships with the package, through `evaluate`."""
    with resources.as_file(resources.files(__package__) / "bleu_metric.py") as path:
        return evaluate.load(str(path))


def read_parallel(hypotheses: str, references: list[str]) -> tuple[list[str], list[list[str]]]:
    """Translations, and for each the list of its references.

    Raises:
        DataError: A file is empty or broken, or the files have different numbers of lines.
        FileNotFoundError: No such file.
    """
    columns = []
    for file in (hypotheses, *references):
        check_file(file)
        columns.append(list(read_lines(file)))
        if not columns[-1]:
            raise DataError(f"{file}: empty file.")
        if len(columns[-1]) != len(columns[0]):
            raise DataError(f"{hypotheses} has {len(columns[0])} lines, {file} has {len(columns[-1])}.")
    return columns[0], [list(group) for group in zip(*columns[1:])]


def score(hypotheses: str, references: list[str], tokenized: bool = False, lowercase: bool = False) -> dict:
    """BLEU of a file of translations.

    Args:
        hypotheses (`str`): File of translations, one a line.
        references (`list[str]`): Files of references, parallel to it.
        tokenized (`bool`): The text is already tokenised: count its words as they are (tokenised BLEU).
        lowercase (`bool`): Ignore case.

    Returns:
        The name of the `metric`, its `score`, sacreBLEU's `signature`, and what the score is made of.
    """
    predictions, groups = read_parallel(hypotheses, references)
    result = load_bleu().compute(
        predictions=predictions, references=groups, tokenize="none" if tokenized else "13a", lowercase=lowercase
    )
    return {"metric": "tokenised BLEU" if tokenized else "sacreBLEU", "sentences": len(predictions), **result}


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani score`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani score", description=__doc__)
    parser.add_argument("--hypotheses", required=True, help="translations, one a line")
    parser.add_argument("--references", required=True, nargs="+", help="one or more files of references")
    parser.add_argument(
        "--tokenized",
        action="store_true",
        help="the text is already tokenised: report tokenised BLEU, which is not comparable with sacreBLEU",
    )
    parser.add_argument("--lowercase", action="store_true", help="ignore case")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    result = score(args.hypotheses, args.references, args.tokenized, args.lowercase)
    if args.json:
        print(json.dumps(result))
        return
    precisions = "/".join(f"{p:.1f}" for p in result["precisions"])
    print(
        f"{result['metric']} = {result['score']:.2f} ({precisions}, BP {result['brevity_penalty']:.3f}, "
        f"{result['hypothesis_length']} words for {result['reference_length']}, {result['sentences']} sentences)\n"
        f"{result['signature']}"
    )


if __name__ == "__main__":
    main()
