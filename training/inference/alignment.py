"""Word alignment from the cross-attention of the decoder.

Each word of a given translation is linked to the source word with the highest attention weight, by forced decoding.
The weights come from one decoder layer, of a single head or averaged over all heads. There are two positions at which
to read the attention of a target word:

- "shift": the position at which the word is the decoder's input (Chen et al. 2020, "Accurate Word Alignment Induction
  from Neural Machine Translation", SHIFT-ATT). Lower layers work best, in that paper the third of six.
- "naive": the position at which the word is the decoder's output and not yet known. Upper layers work best, often the
  penultimate (Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models").

The best layer and head differ from model to model. A wrong layer can be worse than the diagonal, and a single head can
be much better than the mean. `best_maps` selects them without aligned data: the two positions agree only where both
are right.
"""

import logging
import re
from collections.abc import Iterator

import torch
from torch.nn.functional import one_hot
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .attention_maps import check_number, eager_attention
from .batches import token_batches
from .choices import METHODS


logger = logging.getLogger(__name__)


# The decoder reads the start token and then the translation: its positions that belong to the target tokens.
POSITIONS = {"shift": slice(1, None), "naive": slice(None, -1)}
Map = tuple[int, int | str]  # decoder layer and head, both counted from 1, or "mean" of all heads
SAMPLE = 100  # pairs on which layers and heads are selected


def words_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int | None]]:
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
    encoding = tokenizer(text, return_offsets_mapping=True)
    word_at: list[int | None] = [None] * len(text)
    for index, word in enumerate(re.finditer(r"\S+", text)):
        word_at[slice(*word.span())] = [index] * len(word.group())
    # A token may begin with the space that precedes its word.
    words = [next((w for w in word_at[slice(*s)] if w is not None), None) for s in encoding["offset_mapping"]]
    return encoding["input_ids"], words


def best_words(
    attention: torch.Tensor, source_words: list[int | None], target_words: list[int | None]
) -> torch.Tensor:
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
    """Select attention maps `(batch, maps, target, source)` from the layers, each `(batch, heads, target, source)`."""
    floats = {layer: layers[layer - 1].float() for layer, _ in maps}
    selected = [floats[layer].mean(1) if head == "mean" else floats[layer][:, head - 1] for layer, head in maps]
    return torch.stack(selected, dim=1).cpu()


@torch.no_grad()
def _attentions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[tuple], maps: list[Map], budget: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute cross-attention maps in batches of at most `budget` tokens.

    Args:
        ids (`list[tuple]`): Source and target token ids of each pair.

    Yields:
        The index of a pair, and its attention weights `(maps, target tokens, source tokens)`.
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
                yield index, weights[:, : len(ids[index][1]), : len(ids[index][0])]


def _check_map(model: PreTrainedModel, layer: int, head: int | str) -> Map:
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
    ids = [(tokenizer(source)["input_ids"], tokenizer(translation)["input_ids"])]
    [(_, weights)] = _attentions(model, tokenizer, ids, [_check_map(model, layer, head)], budget=1)
    return weights[0, POSITIONS[method]]


def _tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase, sources: list[str], translations: list[str]
) -> dict[int, tuple]:
    """Apply `words_of` to both sides of each pair, by index. Pairs with an empty side are left out."""
    if len(sources) != len(translations):
        raise ValueError(f"sources and translations must be equally many, got {len(sources)} and {len(translations)}.")
    pairs = ((words_of(tokenizer, source), words_of(tokenizer, text)) for source, text in zip(sources, translations))
    return {index: pair for index, pair in enumerate(pairs) if all(set(words) - {None} for _, words in pair)}


def _agreement(words: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Chance-corrected agreement between the links of two sets of maps.

    It is the number of target words that two maps link to the same source word, minus the number expected if each map
    drew the link of every word at random from its own links in the sentence.

    Args:
        words, others (`torch.Tensor` of shape `(maps, target words)`): Source word of each target word.

    Returns:
        `torch.Tensor` of shape `(maps, other maps)`.
    """
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
    """Select the layer and head for "shift" and for "naive" whose links agree most often on the given pairs.

    Chen et al. (2020) similarly select a layer by the agreement between the two translation directions. The agreement
    is corrected for chance: two maps that link every word to the full stop agree, but are uninformative. A few pairs
    are enough.

    Args:
        model, tokenizer, sources, translations, batch_tokens: As for [`align`].

    Returns:
        `dict[str, tuple[int, int | str]]`: For each method, the layer and the head, counted from 1, or "mean". If no
        pair has words, the first map is selected.
    """
    pairs = list(_tokenize_pairs(tokenizer, sources, translations).values())
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


def _select_maps(model, tokenizer, sources, translations, layer, head, method, batch_tokens) -> dict[str, Map]:
    """Attention map for each position ("shift", "naive" or both) according to the arguments of `align`."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if layer is not None and method == "both":
        raise ValueError('layer must not be given with method "both", which selects two layers by their agreement.')
    if layer is not None:
        return {method: _check_map(model, layer, "mean" if head is None else head)}
    if head is not None:
        raise ValueError(f"head {head} also needs a layer.")
    best = best_maps(model, tokenizer, sources, translations, batch_tokens)
    best = best if method == "both" else {method: best[method]}
    for name, (layer, head) in best.items():
        logger.info("%s: layer %d, head %s, selected by agreement on %d pairs.", name, layer, head, len(sources))
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
    """Align the words of translations with the words of their sources.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Fast tokenizer of the same checkpoint.
        sources, translations (`list[str]`): Raw sentences, lists of equal length.
        layer (`int`, *optional*): Decoder layer, counted from 1. If not given, `best_maps` selects the layer and head
            on the first hundred pairs.
        head (`int` or `str`, *optional*): Head of that layer, counted from 1, or "mean" (default).
        method (`str`): "shift", "naive", or "both": the sum of the two, each with its own layer and head.
        batch_tokens (`int`): Tokens per batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Progress bar, advanced once per pair.

    Returns:
        `list[list[tuple[int, int]]]`: For each pair, the sorted links from a source word to a target word, counted
        from 0 as in `text.split()`. There is one link for each target word that has a token (`best_words`). A pair
        with an empty side has no links.

    Raises:
        ValueError: The model has no such layer or head; the method is unknown; a layer is given with "both", or a head
            without a layer; the numbers of sources and translations differ; or the tokenizer is not a fast one.
    """
    pairs = _tokenize_pairs(tokenizer, sources, translations)
    sample = list(pairs)[:SAMPLE]
    some_sources, some_translations = ([texts[index] for index in sample] for texts in (sources, translations))
    maps = _select_maps(model, tokenizer, some_sources, some_translations, layer, head, method, batch_tokens)
    links: list[list[tuple[int, int]]] = [[] for _ in sources]
    if progress is not None:
        progress.update(len(links) - len(pairs))
    indices, ids = list(pairs), [(source[0], target[0]) for source, target in pairs.values()]
    for position, weights in _attentions(model, tokenizer, ids, list(maps.values()), batch_tokens):
        (_, source_words), (_, target_words) = pairs[indices[position]]
        attention = sum(matrix[POSITIONS[name]] for name, matrix in zip(maps, weights))
        words = best_words(attention, source_words, target_words[:-1]).tolist()
        # A tokenizer that drops characters may leave a word without tokens, so without a link.
        links[indices[position]] = sorted((words[target], target) for target in set(target_words) - {None})
        if progress is not None:
            progress.update()
    return links
