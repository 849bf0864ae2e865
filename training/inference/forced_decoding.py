"""Log probabilities of given translations, token by token."""

import math

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .batches import token_batches


@torch.no_grad()
def id_log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[list[int]],
    targets: list[list[int]],
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[float]]:
    """Natural logarithms of the probabilities of every translation's tokens, by forced decoding.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint; it pads.
        sources, targets (`list[list[int]]`): Token ids, as many lists of the one as of the other; a target is without
            the start token, and with the end token where that is to count.
        batch_tokens (`int`): Tokens of a batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Moved on by one a pair.

    Returns:
        `list[list[float]]`: For each pair, a number a token of the target.

    Raises:
        ValueError: The model gives a token NaN or an infinite number.
    """
    results: list[list[float]] = [[]] * len(sources)
    for batch in token_batches([max(len(s), len(t)) for s, t in zip(sources, targets)], batch_tokens):
        inputs = tokenizer.pad({"input_ids": [sources[i] for i in batch]}, return_tensors="pt").to(model.device)
        labels = tokenizer.pad({"input_ids": [targets[i] for i in batch]}, return_tensors="pt").to(model.device)
        labels = labels["input_ids"]
        decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(**inputs, decoder_input_ids=decoder_inputs).logits.float()
        found = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        for index, row in zip(batch, found.tolist()):
            results[index] = row[: len(targets[index])]
            if (wrong := next((number for number in results[index] if not math.isfinite(number)), None)) is not None:
                raise ValueError(
                    f"Pair {index + 1} of {len(sources)}: the model gives a token the log probability {wrong}; "
                    f"expected a finite number. It computes in {model.dtype}."
                )
        if progress is not None:
            progress.update(len(batch))
    return results


class TokenTexts(dict):
    """The text of every token, found when it is first asked for.

    Behind another token, as at the start of a text a space is left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.before = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.skipped = len(tokenizer.decode(self.before))

    def __missing__(self, token: int) -> str:
        self[token] = self.tokenizer.decode([*self.before, token])[self.skipped :]
        return self[token]


def token_log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[float]]:
    """Natural logarithms of the probabilities of every translation's tokens, the end token included.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        sources, translations (`list[str]`): Raw text, as many of the one as of the other.
        batch_tokens (`int`): Tokens of a batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Moved on by one a pair.

    Returns:
        `list[list[float]]`: For each pair, a number a token. Their sum is `-loss` times their count.
    """
    encoded = [[tokenizer(text)["input_ids"] for text in side] for side in (sources, translations)]
    return id_log_probabilities(model, tokenizer, *encoded, batch_tokens, progress)
