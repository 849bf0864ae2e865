"""Comparison of sentence pairs with the direction that a model translates in."""

from collections.abc import Iterable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .forced_decoding import id_log_probabilities
from .loading import position_limit


NUM_PAIRS = 32  # that are compared
MIN_PAIRS = 8
MAX_TOKENS = 200  # longer sentences are left out
MIN_SHARE = 0.9  # of the pairs that are likelier in reverse
MIN_DIFFERENCE = 1.0  # nats per token, mean over the pairs


def is_reversed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Iterable[tuple[str, str]]
) -> tuple[float, float] | None:
    """Find out whether a model knows pairs from target to source instead of from source to target.

    A model gives a language that it never writes about 4 to 6 nats per token less than the one it writes. Between two
    languages that it does not write, differences are small and of either sign.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        pairs (`Iterable[tuple[str, str]]`): Sources and targets, of which the first `NUM_PAIRS` that are not too long
            are read.

    Returns:
        `None` unless nearly all pairs are clearly likelier in reverse; else the log probability per token of the
        targets given the sources, and of the sources given the targets.
    """
    limit = min(MAX_TOKENS, position_limit(model) or MAX_TOKENS)
    encoded = []
    for pair in pairs:
        if not all(text.strip() for text in pair):
            continue
        read, given = ([tokenizer(**{side: text})["input_ids"] for text in pair] for side in ("text", "text_target"))
        if max(map(len, [*read, *given])) <= limit:
            encoded.append((*read, *given))
        if len(encoded) == NUM_PAIRS:
            break
    if len(encoded) < MIN_PAIRS:
        return None
    sources, targets, given_sources, given_targets = (list(side) for side in zip(*encoded))
    forward, backward = (
        [sum(row) / len(row) for row in id_log_probabilities(model, tokenizer, *sides)]
        for sides in ((sources, given_targets), (targets, given_sources))
    )
    share = sum(there < back for there, back in zip(forward, backward)) / len(forward)
    means = sum(forward) / len(forward), sum(backward) / len(backward)
    return means if share >= MIN_SHARE and means[1] - means[0] >= MIN_DIFFERENCE else None
