"""Translate raw sentences in memory, order kept."""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .loading import position_limit
from .search import Request, Search


def encode(tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> list[list[int]]:
    """Token ids of sentences, end token included; none for what is empty or only white space."""
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
    """Translations of raw sentences, in their order.

    Args:
        model (`PreTrainedModel`): In evaluation mode. Its `generation_config` says how to search, and how long an
            output may be.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        sentences (`list[str]`): Raw text. An empty sentence gives an empty translation.
        batch_tokens (`int`): Source tokens of a batch, padding included.
        progress (`tqdm`, *optional*): Moved on by one a sentence.
        **generate_kwargs: For `generate()`.

    Returns:
        `list[str]`: As many as `sentences`.

    Raises:
        ValueError: A sentence is longer than the model's learned positions.
    """
    ids = encode(tokenizer, sentences)
    _check_lengths(model, sentences, ids)
    search = Search([model], tokenizer, batch_tokens, **generate_kwargs)
    translations = [""] * len(sentences)
    if progress is not None:
        progress.update(sum(not i for i in ids))
    for index, found in search.translate([Request(i) for i in ids]):
        translations[index] = found[0].text
        if progress is not None:
            progress.update()
    return translations


def _check_lengths(model: PreTrainedModel, sentences: list[str], ids: list[list[int]]) -> None:
    """Raises ValueError for a sentence that does not fit a learned position table."""
    room = position_limit(model)
    for sentence, tokens in zip(sentences, ids):
        if room is not None and len(tokens) > room:
            raise ValueError(
                f"A sentence has {len(tokens)} tokens, and the model's learned positions end at {room}: "
                f"{sentence[:60]!r}..."
            )


def translate_lines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: Iterable[str], window: int, **kwargs
) -> Iterator[str]:
    """Translations of a stream of lines, in order and in constant memory: `window` lines are sorted at a time."""
    lines = iter(lines)
    while chunk := list(islice(lines, window)):
        yield from translate(model, tokenizer, chunk, **kwargs)
