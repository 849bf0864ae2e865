"""The modules of `evaluate` that ship with the package, and BLEU of files by them."""

from importlib import resources

import evaluate

from ..data.readers import read_parallel


def load_bleu() -> evaluate.EvaluationModule:
    """The BLEU module that ships with the package, through `evaluate`."""
    return _load("bleu_metric.py")


def load_metrics() -> evaluate.EvaluationModule:
    """The module of all metrics that ships with the package, through `evaluate`."""
    return _load("translation_metric.py")


def _load(name: str) -> evaluate.EvaluationModule:
    with resources.as_file(resources.files(__package__)) as folder:
        return evaluate.load(str(folder / name))


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
