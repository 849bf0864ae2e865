"""Word alignment by attention or by erasure.

Each word of a given translation is linked to one source word, by forced decoding.

Attention: the source word with the highest weight in the cross-attention of a decoder layer, of a single head or
averaged over all heads. There are two positions at which to read the attention of a target word:

- "naive": the position at which the word is the decoder's output and not yet known. The last layer or the penultimate
  is often the best (Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models").
- "shift": the position at which the word is the decoder's input (Chen et al. 2020, "Accurate Word Alignment Induction
  from Neural Machine Translation", SHIFT-ATT). There, lower layers of a decoder of six work best. In the trained
  models of two and three layers that this project measured, every layer is wrong.

Erasure: the source word without which the translated word becomes least likely, when the cross-attention cannot see
it (Li et al. 2019, "On the Word Alignment from Neural Machine Translation", prediction difference). It depends on no
layer or head, and can be better than any attention map. It decodes each pair once for every source word.

The best position, layer and head differ from model to model, and a wrong choice can be worse than the diagonal.
`best_map` selects them without aligned data: the map that agrees most with erasure on a sample of the pairs.
"""

import logging
import re
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from .attention_maps import check_number, eager_attention
from .batches import token_batches
from .choices import METHODS


logger = logging.getLogger(__name__)


# The decoder reads the start token and then the translation: its positions that belong to the target tokens.
POSITIONS = {"shift": slice(1, None), "naive": slice(None, -1)}
# Position, decoder layer and head of an attention map. Layer and head count from 1; "mean" is the mean of the heads.
Map = tuple[str, int, int | str]
Words = list[int | None]  # word of each token
Pair = tuple[tuple[list[int], Words], tuple[list[int], Words]]  # token ids and words of a source and its translation
SAMPLE = 100  # pairs on which a map is selected
GOOD_AGREEMENT = 0.8  # with erasure, as a share of target words


def words_of(tokenizer: PreTrainedTokenizerBase, text: str, is_target: bool = False) -> tuple[list[int], Words]:
    """Token ids of a text, and the index of the word that each token belongs to.

    Words are those of `text.split()`, counted from 0. Tokens outside words, such as white space or the end token, have
    `None`.

    Raises:
        ValueError: The tokenizer is not a fast one, so it has no character offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} has no character offsets; word alignment needs a fast tokenizer."
        )
    encoding = tokenizer(**{"text_target" if is_target else "text": text}, return_offsets_mapping=True)
    word_at: Words = [None] * len(text)
    for index, word in enumerate(re.finditer(r"\S+", text)):
        word_at[slice(*word.span())] = [index] * len(word.group())
    # A token may begin with the space that precedes its word.
    words = [next((w for w in word_at[slice(*s)] if w is not None), None) for s in encoding["offset_mapping"]]
    return encoding["input_ids"], words


def best_words(attention: torch.Tensor, source_words: Words, target_words: Words) -> torch.Tensor:
    """Source word with the highest attention weight for each target word.

    The weight between two words is summed over the tokens of both. Ties go to the first word. The weight on the end
    token and on white space is ignored: heads with nothing to attend to put their weight there.

    Args:
        attention (`torch.Tensor` of shape `(..., target tokens, source tokens)`): Attention weights.
        source_words, target_words (`list[int | None]`): Word index of each token, as from `words_of`. Both sides have
            at least one word.

    Returns:
        `torch.Tensor` of shape `(..., target words)`: Indices of source words, counted from 0.
    """
    for dimension, words in ((-1, source_words), (-2, target_words)):
        tokens, words = zip(*[(token, word) for token, word in enumerate(words) if word is not None])
        shape = list(attention.shape)
        shape[dimension] = max(words) + 1
        word_tokens = attention.index_select(dimension, torch.tensor(tokens))
        attention = attention.new_zeros(shape).index_add_(dimension, torch.tensor(words), word_tokens)
    return torch.from_numpy(attention.numpy().argmax(-1))


def _choose(layers: tuple[torch.Tensor, ...], maps: list[Map]) -> torch.Tensor:
    """Select attention maps `(batch, maps, target, source)` from the layers, each `(batch, heads, target, source)`.

    The target has the tokens of the translation without its last one, the end token.
    """
    selected = []
    for position, layer, head in maps:
        weights = layers[layer - 1].float()
        weights = weights.mean(1) if head == "mean" else weights[:, head - 1]
        selected.append(weights[:, POSITIONS[position]])
    return torch.stack(selected, dim=1).cpu()


@torch.no_grad()
def _attentions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[tuple], maps: list[Map], budget: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute cross-attention maps in batches of at most `budget` tokens.

    Args:
        ids (`list[tuple]`): Source and target token ids of each pair.

    Yields:
        The index of a pair, and its attention weights `(maps, target tokens - 1, source tokens)`.
    """
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
                yield index, weights[:, : len(ids[index][1]) - 1, : len(ids[index][0])]


@torch.no_grad()
def _erased_losses(model, tokenizer, pairs: list[Pair], rows: list[tuple[int, int | None]]) -> torch.Tensor:
    """Losses `(rows, target tokens)`, with padding, of pairs whose decoder cannot see a source word.

    Args:
        rows (`list[tuple[int, int | None]]`): Index of a pair, and a word of its source or `None`.
    """
    places = {index: place for place, index in enumerate(dict.fromkeys(index for index, _ in rows))}
    source, target = (
        tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
        for ids in ([pairs[index][0][0] for index in places], [pairs[index][1][0] for index, _ in rows])
    )
    pair_of_row = torch.tensor([places[index] for index, _ in rows], device=model.device)
    # The encoder reads the whole source.
    states = model.get_encoder()(**source).last_hidden_state[pair_of_row]
    mask = source["attention_mask"][pair_of_row]
    for row, (index, word) in enumerate(rows):
        if word is not None:
            mask[row, [token for token, other in enumerate(pairs[index][0][1]) if other == word]] = 0
    labels = target["input_ids"]
    logits = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        attention_mask=mask,
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        use_cache=False,
    ).logits
    return cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").cpu()


def erasure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], budget: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Fall of the log probability of each target token when the decoder cannot see a source word.

    Args:
        model, tokenizer: As for [`align`].
        pairs (`list[Pair]`): Token ids and words of the two sides of each pair, as from `words_of`.
        budget (`int`): Tokens per batch on the longer side, padding included.

    Yields:
        The index of a pair, and its falls `(target tokens, source words)`, float32, in nats; -inf for a word without
        tokens.
    """
    words = [sorted(set(source_words) - {None}) for (_, source_words), _ in pairs]
    rows = [(index, word) for index in range(len(pairs)) for word in (None, *words[index])]
    lengths = [max(len(ids) for ids, _ in pairs[index]) for index, _ in rows]
    losses: list[torch.Tensor] = []  # of the pair at hand: its rows are neighbours, also when sorted by length
    for batch in token_batches(lengths, budget):
        batch_rows = [rows[number] for number in batch]
        for (index, _), loss in zip(batch_rows, _erased_losses(model, tokenizer, pairs, batch_rows)):
            target = pairs[index][1][0]
            losses.append(loss[: len(target)])
            if len(losses) == 1 + len(words[index]):
                everything, *without = losses
                falls = torch.full((len(target), words[index][-1] + 1), -torch.inf)
                falls[:, words[index]] = torch.stack(without, dim=1) - everything[:, None]
                losses = []
                yield index, falls


def erasure_words(model, tokenizer, pairs: list[Pair], budget: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of a pair, and the source word of each of its target words by erasure."""
    for index, falls in erasure(model, tokenizer, pairs, budget):
        yield index, best_words(falls, list(range(falls.shape[1])), pairs[index][1][1])


def _check_layer_and_head(model: PreTrainedModel, layer: int, head: int | str) -> None:
    check_number("layer", layer, model.config.decoder_layers)
    if head == "mean":
        return
    if not isinstance(head, int):
        raise ValueError(f'head must be a number or "mean", got {head!r}.')
    check_number("head", head, model.config.decoder_attention_heads)


def attention_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    translation: str,
    layer: int,
    head: int | str = "mean",
    method: str = "naive",
) -> torch.Tensor:
    """Attention weights from the tokens of a translation to those of its source.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        source, translation (`str`): Raw sentences.
        layer (`int`): Decoder layer, counted from 1.
        head (`int` or `str`): Head, counted from 1, or "mean".
        method (`str`): "shift" or "naive".

    Returns:
        `torch.Tensor` of shape `(target tokens, source tokens)`, float32: target tokens without the end token, source
        tokens with it. Rows sum to 1.

    Raises:
        ValueError: The model has no such layer or head, or the method is unknown.
    """
    if method not in POSITIONS:
        raise ValueError(f"method must be one of {', '.join(POSITIONS)}, got {method!r}.")
    _check_layer_and_head(model, layer, head)
    ids = [(tokenizer(source)["input_ids"], tokenizer(text_target=translation)["input_ids"])]
    [(_, weights)] = _attentions(model, tokenizer, ids, [(method, layer, head)], budget=1)
    return weights[0]


def _tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase, sources: list[str], translations: list[str]
) -> dict[int, Pair]:
    """Apply `words_of` to both sides of each pair, by index. Pairs with an empty side are left out."""
    if len(sources) != len(translations):
        raise ValueError(f"sources and translations must be equally many, got {len(sources)} and {len(translations)}.")
    pairs = (
        (words_of(tokenizer, source), words_of(tokenizer, translation, is_target=True))
        for source, translation in zip(sources, translations)
    )
    return {index: pair for index, pair in enumerate(pairs) if all(set(words) - {None} for _, words in pair)}


def best_map(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
    maps: list[Map],
    batch_tokens: int = 4096,
) -> tuple[Map, float]:
    """Select the attention map that links most target words as erasure does.

    Args:
        model, tokenizer, batch_tokens: As for [`align`].
        pairs (`list[Pair]`): Token ids and words of the two sides of each pair. A hundred pairs are enough.
        maps (`list[tuple]`): Maps to select from. The first of equals is selected.

    Returns:
        The map, and the share of target words that it links as erasure does, from 0 to 1; 1 if there are no pairs.
    """
    agreement = torch.zeros(len(maps), dtype=torch.long)
    ids = [(source[0], target[0]) for source, target in pairs]
    expected = dict(erasure_words(model, tokenizer, pairs, batch_tokens))
    for index, weights in _attentions(model, tokenizer, ids, maps, batch_tokens):
        (_, source_words), (_, target_words) = pairs[index]
        agreement += (best_words(weights, source_words, target_words[:-1]) == expected[index]).sum(-1)
    best = int(agreement.argmax())
    number = sum(len(set(words) - {None}) for _, (_, words) in pairs)
    return maps[best], agreement[best].item() / number if number else 1.0


def _candidates(model: PreTrainedModel, method: str, layer: int | None, head: int | str | None) -> list[Map]:
    """Attention maps that the arguments of `align` leave to select from."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if layer is None and head is not None:
        raise ValueError(f"head {head} also needs a layer.")
    if method == "erasure" and layer is not None:
        raise ValueError(f"layer {layer}: erasure uses no layer; expected an attention method.")
    positions = ["naive", "shift"] if method == "attention" else [method]
    if layer is not None:
        head = "mean" if head is None else head
        _check_layer_and_head(model, layer, head)
        return [(position, layer, head) for position in positions]
    # The last layers first, and the mean before single heads.
    layers = range(model.config.decoder_layers, 0, -1)
    heads = ["mean", *range(1, model.config.decoder_attention_heads + 1)]
    return [(position, layer, head) for position in positions for layer in layers for head in heads]


def _select_map(model, tokenizer, pairs: list[Pair], maps: list[Map], batch_tokens: int) -> Map:
    """Select a map by `best_map` if there are several, and log the choice."""
    if len(maps) == 1:
        return maps[0]
    best, agreement = best_map(model, tokenizer, pairs, maps, batch_tokens)
    position, layer, head = best
    heads = "mean of the heads" if head == "mean" else f"head {head}"
    logger.info(
        "Attention: %s, layer %d, %s. It links %.1f%% of the target words in %d pairs as erasure does.",
        *(position, layer, heads, 100 * agreement, len(pairs)),
    )
    if agreement < GOOD_AGREEMENT:
        logger.warning(
            "Below %.0f%%, many links may be wrong. Erasure (--method erasure) is slower, but may be better.",
            100 * GOOD_AGREEMENT,
        )
    return best


def _attention_words(
    model, tokenizer, pairs: list[Pair], chosen: Map, budget: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of a pair, and the source word of each of its target words by attention."""
    ids = [(source[0], target[0]) for source, target in pairs]
    for index, weights in _attentions(model, tokenizer, ids, [chosen], budget):
        (_, source_words), (_, target_words) = pairs[index]
        yield index, best_words(weights[0], source_words, target_words[:-1])


def align(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    layer: int | None = None,
    head: int | str | None = None,
    method: str = "attention",
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[tuple[int, int]]]:
    """Align the words of translations with the words of their sources.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Fast tokenizer of the same checkpoint.
        sources, translations (`list[str]`): Raw sentences, lists of equal length.
        layer (`int`, *optional*): Decoder layer, counted from 1. If not given, `best_map` selects the layer and head
            on the first hundred pairs.
        head (`int` or `str`, *optional*): Head of that layer, counted from 1, or "mean" (default).
        method (`str`): "shift" or "naive" for attention at that position, "attention" for the better of the two, or
            "erasure". See the module's docstring.
        batch_tokens (`int`): Tokens per batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Progress bar, advanced once per pair.

    Returns:
        `list[list[tuple[int, int]]]`: For each pair, the sorted links from a source word to a target word, counted
        from 0 as in `text.split()`. There is one link for each target word that has a token (`best_words`). A pair
        with an empty side has no links.

    Raises:
        ValueError: The model has no such layer or head; the method is unknown; a layer is given with "erasure", or a
            head without a layer; the numbers of sources and translations differ; or the tokenizer is not a fast one.
    """
    indexed = _tokenize_pairs(tokenizer, sources, translations)
    indices, pairs = list(indexed), list(indexed.values())
    maps = _candidates(model, method, layer, head)
    if method == "erasure":
        results = erasure_words(model, tokenizer, pairs, batch_tokens)
    else:
        chosen = _select_map(model, tokenizer, pairs[:SAMPLE], maps, batch_tokens)
        results = _attention_words(model, tokenizer, pairs, chosen, batch_tokens)
    links: list[list[tuple[int, int]]] = [[] for _ in sources]
    if progress is not None:
        progress.update(len(links) - len(pairs))
    for index, words in results:
        # A tokenizer that drops characters may leave a word without tokens, so without a link.
        _, (_, target_words) = pairs[index]
        links[indices[index]] = sorted((int(words[target]), target) for target in set(target_words) - {None})
        if progress is not None:
            progress.update()
    return links
