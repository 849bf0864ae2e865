"""Translation of raw sentences in memory."""

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .loading import position_limit
from .search import Request, Search


def encode(tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> list[list[int]]:
    """Token ids of sentences, end token included. Sentences that are empty or white space have no ids."""
    texts = [sentence for sentence in sentences if sentence.strip()]
    ids = iter(tokenizer(texts)["input_ids"] if texts else [])
    return [next(ids) if sentence.strip() else [] for sentence in sentences]


@torch.no_grad()
def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch_tokens: int = 1024,
    progress: tqdm | None = None,
    **generate_kwargs,
) -> list[str]:
    """Translate raw sentences.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode. Its `generation_config` defines the search and the maximum
            length of the output.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        sentences (`list[str]`): Raw sentences. The translation of an empty sentence is empty.
        batch_tokens (`int`): Source tokens per batch, padding included.
        progress (`tqdm`, *optional*): Progress bar, advanced once per sentence.
        **generate_kwargs: Options of `generate()`.

    Returns:
        `list[str]`: One translation per sentence, in the same order.

    Raises:
        ValueError: A sentence has more tokens than the model has learned positions.
    """
    ids = encode(tokenizer, sentences)
    _check_lengths(model, sentences, ids)
    search = Search([model], tokenizer, batch_tokens, **generate_kwargs)
    translations = [""] * len(sentences)
    if progress is not None:
        progress.update(sum(not tokens for tokens in ids))
    for index, candidates in search.translate([Request(tokens) for tokens in ids]):
        translations[index] = candidates[0].text
        if progress is not None:
            progress.update()
    return translations


def _check_lengths(model: PreTrainedModel, sentences: list[str], ids: list[list[int]]) -> None:
    """Raise ValueError for a sentence that exceeds the learned position table."""
    limit = position_limit(model)
    for sentence, tokens in zip(sentences, ids):
        if limit is not None and len(tokens) > limit:
            raise ValueError(
                f"A sentence has {len(tokens)} tokens, but the model's learned positions end at {limit}: "
                f"{sentence[:60]!r}..."
            )
