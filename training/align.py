"""Align words: for each word of a translation, the word of the source that the model looks at.

The model reads a given translation, and the attention of one decoder layer to the source tells, of one of its heads
or the mean of them. There are two positions to look for a word of the translation:

- "shift": where the decoder has just read the word (Chen et al. 2020, "Accurate Word Alignment Induction from Neural
  Machine Translation", SHIFT-ATT). Lower layers are best, there the third of six.
- "naive": where the decoder is about to write the word, and does not know yet which it will be. Upper layers are
  best, often the last but one (Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models").

A wrong layer gives links that are worse than the diagonal, a single head can be much better than the mean, and which
are right differs from model to model. `best_maps` finds them without aligned data: the two positions agree only where
both are right.
"""

import argparse
import logging
import re
import sys
from collections.abc import Iterator

import torch
from torch.nn.functional import one_hot
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .attention import check_number, eager_attention
from .score import read_parallel
from .translate import DTYPES, load_checkpoint, positive, token_batches


logger = logging.getLogger(__name__)

# Of the decoder's positions, which read the start token and then the translation: those of each target token.
POSITIONS = {"shift": slice(1, None), "naive": slice(None, -1)}
METHODS = (*POSITIONS, "both")
Map = tuple[int, int | str]  # a decoder layer and one of its heads, both counted from 1, or "mean" for all of them
SAMPLE = 100  # pairs to choose layers and heads by


def words_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int | None]]:
    """The tokens of a text, and for each the word it is part of, counted from 0.

    Words are what `text.split()` gives. A token that is part of none, white space or the end token, has `None`.

    Raises:
        ValueError: The tokenizer does not tell which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not tell which characters a token stands for.")
    encoding = tokenizer(text, return_offsets_mapping=True)
    word_at: list[int | None] = [None] * len(text)
    for index, word in enumerate(re.finditer(r"\S+", text)):
        word_at[slice(*word.span())] = [index] * len(word.group())
    # A token may begin with the space before its word.
    words = [next((w for w in word_at[slice(*s)] if w is not None), None) for s in encoding["offset_mapping"]]
    return encoding["input_ids"], words


def best_words(
    attention: torch.Tensor, source_words: list[int | None], target_words: list[int | None]
) -> torch.Tensor:
    """The word of the source that every word of the target attends to, by the attention between their tokens.

    It is the one that gets most, the sum over the tokens of either word; the first of equals. What the end token and
    white space get counts for nothing: heads look there that have nothing to look for.

    Args:
        attention (`torch.Tensor` of shape `(..., target tokens, source tokens)`): From a target to a source token.
        source_words, target_words (`list[int | None]`): The word of every token, `None` for those of no word. Both
            have at least one word.

    Returns:
        `torch.Tensor` of shape `(..., target words)`: Words of the source, counted from 0.
    """
    for dimension, words in ((-1, source_words), (-2, target_words)):
        tokens, words = zip(*[(token, word) for token, word in enumerate(words) if word is not None])
        shape = list(attention.shape)
        shape[dimension] = max(words) + 1
        kept = attention.index_select(dimension, torch.tensor(tokens))
        attention = attention.new_zeros(shape).index_add_(dimension, torch.tensor(words), kept)
    return torch.from_numpy(attention.numpy().argmax(-1))


def _choose(layers: tuple[torch.Tensor, ...], maps: list[Map]) -> torch.Tensor:
    """Of all attention `(batch, heads, target, source)`, a layer each, that of some maps: `(batch, maps, ...)`."""
    floats = {layer: layers[layer - 1].float() for layer, _ in maps}
    chosen = [floats[layer].mean(1) if head == "mean" else floats[layer][:, head - 1] for layer, head in maps]
    return torch.stack(chosen, dim=1).cpu()


@torch.no_grad()
def _attentions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[tuple], maps: list[Map], budget: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Of every pair of `ids`, source and target, its index and the attention of the decoder's positions to the source,
    `(maps, target tokens, source tokens)`; computed in batches of at most `budget` tokens."""
    with eager_attention(model):
        for batch in token_batches([max(map(len, pair)) for pair in ids], budget):
            source, target = (
                tokenizer.pad({"input_ids": [ids[i][side] for i in batch]}, return_tensors="pt").to(model.device)
                for side in (0, 1)
            )
            outputs = model.get_decoder()(
                input_ids=model.prepare_decoder_input_ids_from_labels(target["input_ids"]),
                encoder_hidden_states=model.get_encoder()(**source).last_hidden_state,
                encoder_attention_mask=source["attention_mask"],
                use_cache=False,
                output_attentions=True,
            )
            for index, weights in zip(batch, _choose(outputs.cross_attentions, maps)):
                yield index, weights[:, : len(ids[index][1]), : len(ids[index][0])]


def _checked(model: PreTrainedModel, layer: int, head: int | str) -> Map:
    check_number("layer", layer, model.config.decoder_layers)
    if head == "mean":
        return layer, head
    if not isinstance(head, int):
        raise ValueError(f'head must be a number or "mean", got {head!r}.')
    return layer, check_number("head", head, model.config.decoder_attention_heads)


def attention_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    translation: str,
    layer: int,
    head: int | str = "mean",
    method: str = "shift",
) -> torch.Tensor:
    """Attention from the tokens of a translation to those of its source.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        source, translation (`str`): Raw text.
        layer (`int`): Decoder layer, counted from 1.
        head (`int` or `str`): Head, counted from 1, or "mean".
        method (`str`): "shift" or "naive".

    Returns:
        `torch.Tensor` of shape `(target tokens, source tokens)`, float32: a row for every token of the translation
        without its end token, a column for every token of the source with its end token. Rows sum to 1.

    Raises:
        ValueError: No such layer, head or method.
    """
    if method not in POSITIONS:
        raise ValueError(f"method must be one of {', '.join(POSITIONS)}, got {method!r}.")
    ids = [(tokenizer(source)["input_ids"], tokenizer(translation)["input_ids"])]
    [(_, weights)] = _attentions(model, tokenizer, ids, [_checked(model, layer, head)], budget=1)
    return weights[0, POSITIONS[method]]


def _tokenized(tokenizer: PreTrainedTokenizerBase, sources: list[str], translations: list[str]) -> dict[int, tuple]:
    """By its number, `words_of` either side of every pair that has words on both."""
    if len(sources) != len(translations):
        raise ValueError(f"As many sources as translations are needed, got {len(sources)} and {len(translations)}.")
    pairs = ((words_of(tokenizer, source), words_of(tokenizer, text)) for source, text in zip(sources, translations))
    return {index: pair for index, pair in enumerate(pairs) if all(set(words) - {None} for _, words in pair)}


def _agreement(words: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """How many words of the target each map of one side, `(maps, target words)`, links as each map of the other does,
    less those it would if every word took the link of a random one of its sentence; `(maps, other maps)`."""
    count = int(max(words.max(), others.max())) + 1
    common = (words[:, None] == others[None]).sum(-1)
    frequencies = [one_hot(side, count).sum(1).double() for side in (words, others)]  # (maps, source words)
    return common - frequencies[0] @ frequencies[1].T / words.shape[1]


def best_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    batch_tokens: int = 4096,
) -> dict[str, Map]:
    """The layer and head for "shift" and those for "naive" whose links agree most often on given pairs.

    After Chen et al. (2020), who choose a layer by the agreement of the two directions of translation. What two would
    share by chance does not count: those that look at the full stop from every word agree, but say nothing. A few
    pairs are enough.

    Args:
        model, tokenizer, sources, translations, batch_tokens: As for [`align`].

    Returns:
        `dict[str, tuple[int, int | str]]`: By method, a layer and a head, counted from 1, or "mean". Where no pair has
        words, they are the first.
    """
    pairs = list(_tokenized(tokenizer, sources, translations).values())
    ids = [(source[0], target[0]) for source, target in pairs]
    heads = ["mean", *range(1, model.config.decoder_attention_heads + 1)]
    maps = [(layer, head) for layer in range(1, model.config.decoder_layers + 1) for head in heads]
    agreement = torch.zeros(len(maps), len(maps), dtype=torch.float64)
    for index, weights in _attentions(model, tokenizer, ids, maps, batch_tokens):
        (_, source_words), (_, target_words) = pairs[index]
        agreement += _agreement(
            *(best_words(weights[:, rows], source_words, target_words[:-1]) for rows in POSITIONS.values())
        )
    best = divmod(int(agreement.argmax()), len(maps))
    return {method: maps[number] for method, number in zip(POSITIONS, best)}


def _maps(model, tokenizer, sources, translations, layer, head, method, batch_tokens) -> dict[str, Map]:
    """Where to look, by "shift" or "naive" or both, for the arguments of `align`."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if layer is not None and method == "both":
        raise ValueError('layer must not be given for "both", which takes two: they are chosen by their agreement.')
    if layer is not None:
        return {method: _checked(model, layer, "mean" if head is None else head)}
    if head is not None:
        raise ValueError(f"head {head} needs the number of its layer too.")
    best = best_maps(model, tokenizer, sources, translations, batch_tokens)
    best = best if method == "both" else {method: best[method]}
    for name, (layer, head) in best.items():
        logger.info("%s: layer %d, head %s, by agreement on %d pairs.", name, layer, head, len(sources))
    return best


def align(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    layer: int | None = None,
    head: int | str | None = None,
    method: str = "shift",
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[tuple[int, int]]]:
    """Which word of its source each word of a translation comes from.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint, a fast one.
        sources, translations (`list[str]`): Raw text, as many of the one as of the other.
        layer (`int`, *optional*): Decoder layer, counted from 1. When not given, `best_maps` chooses layer and head by
            the first hundred pairs.
        head (`int` or `str`, *optional*): Head of that layer, counted from 1, or "mean", as when not given.
        method (`str`): "shift", "naive", or "both": the sum of the two, each of its own layer and head.
        batch_tokens (`int`): Tokens of a batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Moved on by one a pair.

    Returns:
        `list[list[tuple[int, int]]]`: For each pair, sorted links of a source word and a target word, counted from
        0 as `text.split()` has them; one for every word of the target that has a token (`best_words`). A pair with no
        word on one side has none.

    Raises:
        ValueError: No such layer, head or method; a layer for "both", a head without a layer; not as many sources as
            translations; a slow tokenizer.
    """
    pairs = _tokenized(tokenizer, sources, translations)
    sample = list(pairs)[:SAMPLE]
    some_sources, some_translations = ([texts[index] for index in sample] for texts in (sources, translations))
    maps = _maps(model, tokenizer, some_sources, some_translations, layer, head, method, batch_tokens)
    links: list[list[tuple[int, int]]] = [[] for _ in sources]
    if progress is not None:
        progress.update(len(links) - len(pairs))
    indices, ids = list(pairs), [(source[0], target[0]) for source, target in pairs.values()]
    for position, weights in _attentions(model, tokenizer, ids, list(maps.values()), batch_tokens):
        (_, source_words), (_, target_words) = pairs[indices[position]]
        attention = sum(matrix[POSITIONS[name]] for name, matrix in zip(maps, weights))
        words = best_words(attention, source_words, target_words[:-1]).tolist()
        # Another tokenizer may drop characters, and with them a word.
        links[indices[position]] = sorted((words[target], target) for target in set(target_words) - {None})
        if progress is not None:
            progress.update()
    return links


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani align`."""
    parser = argparse.ArgumentParser(
        prog="hf-vaswani align", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--sources", required=True, help="text file, a sentence a line, plain or .gz")
    parser.add_argument("--translations", required=True, help="their translations, parallel to it")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="shift",
        help="attention where the decoder has read a word, where it is about to write it, or the sum (%(default)s)",
    )
    parser.add_argument(
        "--layer", type=positive, help="decoder layer, from 1 (layer and head where shift and naive agree most)"
    )
    parser.add_argument("--head", type=positive, help="head of that layer, from 1 (the mean of them)")
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="tokens of a batch (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    args = parser.parse_args(argv)
    translations, groups = read_parallel(args.translations, [args.sources])
    sources = [group[0] for group in groups]
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    with logging_redirect_tqdm(), tqdm(total=len(sources), unit=" pairs", desc="Aligning") as progress:
        options = (args.layer, args.head, args.method, args.batch_tokens, progress)
        results = align(model, tokenizer, sources, translations, *options)
    for links in results:
        print(*(f"{source}-{target}" for source, target in links))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
