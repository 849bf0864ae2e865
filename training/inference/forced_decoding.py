"""Token log probabilities of given translations by forced decoding."""

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
    """Natural log probabilities of the tokens of given translations, by forced decoding of token ids.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint, used for padding.
        sources, targets (`list[list[int]]`): Token ids of the sentences, lists of equal length. Targets have no start
            token; their end token is scored if present.
        batch_tokens (`int`): Tokens per batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Progress bar, advanced once per pair.

    Returns:
        `list[list[float]]`: For each pair, one log probability per target token.

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
        log_probabilities = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        for index, row in zip(batch, log_probabilities.tolist()):
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
    """Text of each token, decoded on first access.

    A token is decoded after another token, because decoding strips the space at the start of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._context = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._context_length = len(tokenizer.decode(self._context))

    def __missing__(self, token: int) -> str:
        self[token] = self.tokenizer.decode([*self._context, token])[self._context_length :]
        return self[token]


def token_log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[float]]:
    """Natural log probabilities of the tokens of given translations, end token included.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        sources, translations (`list[str]`): Raw sentences, lists of equal length.
        batch_tokens (`int`): Tokens per batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Progress bar, advanced once per pair.

    Returns:
        `list[list[float]]`: For each pair, one log probability per target token. Their sum is `-loss` times the
            number of tokens.
    """
    source_ids = [tokenizer(text)["input_ids"] for text in sources]
    target_ids = [tokenizer(text_target=text)["input_ids"] for text in translations]
    return id_log_probabilities(model, tokenizer, source_ids, target_ids, batch_tokens, progress)
