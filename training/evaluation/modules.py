"""The `evaluate` modules of the package, and BLEU of files."""

from importlib import resources

import evaluate

from ..data.readers import read_parallel


def load_bleu() -> evaluate.EvaluationModule:
    """Load the BLEU module of the package through `evaluate`."""
    return _load("bleu_metric.py")


def load_metrics() -> evaluate.EvaluationModule:
    """Load the module of all metrics of the package through `evaluate`."""
    return _load("translation_metric.py")


def _load(name: str) -> evaluate.EvaluationModule:
    with resources.as_file(resources.files(__package__)) as folder:
        return evaluate.load(str(folder / name))


def score(hypotheses: str, references: list[str], tokenized: bool = False, lowercase: bool = False) -> dict:
    """BLEU of a file of translations.

    Args:
        hypotheses (`str`): File of translations, one per line.
        references (`list[str]`): Files of references, parallel to `hypotheses`.
        tokenized (`bool`): The text is already tokenised: compute tokenised BLEU.
        lowercase (`bool`): Ignore case.

    Returns:
        The name of the `metric`, the number of `sentences`, the `score`, sacreBLEU's `signature`, and the components
        of the score: `precisions`, `brevity_penalty`, `hypothesis_length` and `reference_length`.
    """
    predictions, groups = read_parallel(hypotheses, references)
    result = load_bleu().compute(
        predictions=predictions, references=groups, tokenize="none" if tokenized else "13a", lowercase=lowercase
    )
    return {"metric": "tokenised BLEU" if tokenized else "sacreBLEU", "sentences": len(predictions), **result}
