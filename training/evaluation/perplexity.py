"""Perplexity of references under a model, per token and per word."""

import math

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..inference.forced_decoding import token_log_probabilities
from .metrics import MetricScore, current_seed, ratio_interval


TOO_LARGE = "infinite, and null in JSON: the probability of the references is too small for a float."


def perplexities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    references: list[list[str]],
    n_bootstrap: int = 0,
    batch_tokens: int = 4096,
    name: str = "",
) -> list[MetricScore]:
    """Perplexity per token and per word: the exponential of the mean negative log probability of the references.

    The end of each sentence counts as one token and as one word, because its probability is part of the sum. Words are
    separated by white space. Table 3 reports perplexity per token, which depends on the vocabulary: models with
    different vocabularies are comparable only per word. Labels are not smoothed. On overflow, the perplexity is `inf`.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        sources (`list[str]`): Raw sentences.
        references (`list[list[str]]`): Reference streams, each parallel to `sources`; all of them are scored.
        n_bootstrap (`int`): Bootstrap resamples for the confidence intervals; 0 for no intervals.
        batch_tokens (`int`): Tokens per batch on its longer side, padding included.
        name (`str`): Name of the model for the signature.

    Returns:
        `list[MetricScore]`: The perplexity per token and the perplexity per word.
    """
    negative_log_probabilities, tokens, words = (np.zeros(len(sources)) for _ in range(3))
    with tqdm(total=len(sources) * len(references), unit=" pairs", desc="Perplexity") as progress:
        for stream in references:
            log_probabilities = token_log_probabilities(model, tokenizer, sources, stream, batch_tokens, progress)
            negative_log_probabilities -= [math.fsum(row) for row in log_probabilities]
            tokens += [len(row) for row in log_probabilities]
            words += [len(text.split()) + 1 for text in stream]
    figures = []
    for unit, counts in (("token", tokens), ("word", words)):
        with np.errstate(over="ignore"):  # the result is inf
            score = float(np.exp(negative_log_probabilities.sum() / counts.sum()))
            is_finite = math.isfinite(score)
            interval = ratio_interval(np.exp, negative_log_probabilities, counts, n_bootstrap) if is_finite else None
        signature = f"nrefs:{len(references)}|unit:{unit}|end:counted"
        if interval is not None:
            signature += f"|bs:{n_bootstrap}|seed:{current_seed()}"
        details = {"count": int(counts.sum()), "log_probability": -float(negative_log_probabilities.sum())}
        signature += f"|model:{name}"
        note = "lower is better." if is_finite else TOO_LARGE
        figures.append(MetricScore(f"perplexity per {unit}", score, signature, interval, details, note))
    return figures
