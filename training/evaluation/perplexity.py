"""Perplexity of references under a model: of their tokens, and of their words."""

import math

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..inference.forced_decoding import token_log_probabilities
from .metrics import Figure, current_seed, ratio_interval


TOO_LARGE = "infinite, and null in JSON: the probability of the references is too small for a float."


def perplexities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    references: list[list[str]],
    n_bootstrap: int = 0,
    batch_tokens: int = 4096,
    name: str = "",
) -> list[Figure]:
    """Perplexity per token and per word: e to the mean negative log probability that the model gives to references.

    Both count the end of each sentence, once as a token and once as a word, as its probability is part of the sum.
    Words are what white space separates. Per token is what Table 3 reports, and depends on the vocabulary: models
    with different ones can only be compared per word. Labels are not smoothed. One that no float can hold is `inf`.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        sources (`list[str]`): Raw text.
        references (`list[list[str]]`): Lists of references, each parallel to `sources`; all of them count.
        n_bootstrap (`int`): Resamples of the sentences for the intervals; 0 for none.
        batch_tokens (`int`): Tokens of a batch on its longer side, padding included.
        name (`str`): Of the model, for the signature.

    Raises:
        ValueError: A log probability is not a number.
    """
    costs, tokens, words = (np.zeros(len(sources)) for _ in range(3))
    with tqdm(total=len(sources) * len(references), unit=" pairs", desc="Perplexity") as progress:
        for stream in references:
            found = token_log_probabilities(model, tokenizer, sources, stream, batch_tokens, progress)
            _check_numbers(found, name)
            costs -= [math.fsum(numbers) for numbers in found]
            tokens += [len(numbers) for numbers in found]
            words += [len(text.split()) + 1 for text in stream]
    figures = []
    for unit, counts in (("token", tokens), ("word", words)):
        with np.errstate(over="ignore"):  # too large for a float, it is inf
            score = float(np.exp(costs.sum() / counts.sum()))
            interval = ratio_interval(np.exp, costs, counts, n_bootstrap) if math.isfinite(score) else None
        signature = f"nrefs:{len(references)}|unit:{unit}|end:counted"
        if interval is not None:
            signature += f"|bs:{n_bootstrap}|seed:{current_seed()}"
        details = {"count": int(counts.sum()), "log_probability": -float(costs.sum())}
        signature += f"|model:{name}"
        note = "lower is better." if math.isfinite(score) else TOO_LARGE
        figures.append(Figure(f"perplexity per {unit}", score, signature, interval, details, note))
    return figures


def _check_numbers(found: list[list[float]], name: str) -> None:
    """Raises ValueError for a log probability that is not a number; minus infinity is one, of the probability 0."""
    for line, numbers in enumerate(found, start=1):
        if any(math.isnan(number) for number in numbers):
            raise ValueError(
                f"{name or 'the model'}: the log probability of reference {line} is not a number (NaN): its weights "
                "are broken, or overflow in the type that it computes with."
            )
