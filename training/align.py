"""Align words: for each word of a translation, the word of the source that the model looks at.

The model reads a given translation, and the attention of one decoder layer to the source, the mean over its heads,
tells. There are two places to look for a word of the translation:

- "shift": where the decoder has just read the word (Chen et al. 2020, "Accurate Word Alignment Induction from Neural
  Machine Translation", SHIFT-ATT). Lower layers are best, there the third of six.
- "naive": where the decoder is about to write the word, and does not know yet which it will be. Upper layers are
  best, often the last but one (Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models").

A wrong layer gives links that are worse than the diagonal, and which one is right differs from model to model.
`best_layers` finds it without aligned data: the two places agree only where both are right.
"""

import argparse
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator

import torch
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
SAMPLE = 100  # pairs to choose the layers by


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


def links_of(
    attention: torch.Tensor, source_words: list[int | None], target_words: list[int | None]
) -> list[tuple[int, int]]:
    """Links between words by the attention between their tokens.

    Every word of the target is linked to the one word of the source that gets most of its attention, which is the sum
    over the tokens of either; to the first of equals. What the end token and white space get counts for nothing:
    heads look there that have nothing to look for.

    Args:
        attention (`torch.Tensor` of shape `(target tokens, source tokens)`): From a target token to a source token.
        source_words, target_words (`list[int | None]`): The word of every token, `None` for those of no word. Both
            have at least one word.

    Returns:
        `list[tuple[int, int]]`: Source word and target word, sorted.
    """
    rows, source = zip(*[(row, word) for row, word in enumerate(source_words) if word is not None])
    by_source = attention.new_zeros(len(attention), max(source) + 1)
    by_source.index_add_(1, torch.tensor(source), attention[:, list(rows)])
    rows, target = zip(*[(row, word) for row, word in enumerate(target_words) if word is not None])
    by_word = by_source.new_zeros(max(target) + 1, by_source.shape[1])
    by_word.index_add_(0, torch.tensor(target), by_source[list(rows)])
    return sorted((best, word) for word, best in enumerate(by_word.numpy().argmax(-1).tolist()))


@torch.no_grad()
def _attentions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[tuple], budget: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Of every pair of `ids`, source and target, its index and the attention of the decoder's positions to the source,
    `(layers, target tokens, source tokens)`, the mean over the heads; a batch of at most `budget` tokens at a time."""
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
            # (batch, layers, target, source)
            weights = torch.stack([layer.float().mean(1) for layer in outputs.cross_attentions], dim=1).cpu()
            for index, layers in zip(batch, weights):
                yield index, layers[:, : len(ids[index][1]), : len(ids[index][0])]


def attention_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    translation: str,
    layer: int,
    method: str = "shift",
) -> torch.Tensor:
    """Attention from the tokens of a translation to those of its source, the mean over the heads of a layer.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        source, translation (`str`): Raw text.
        layer (`int`): Decoder layer, counted from 1.
        method (`str`): "shift" or "naive".

    Returns:
        `torch.Tensor` of shape `(target tokens, source tokens)`, float32: a row for every token of the translation
        without its end token, a column for every token of the source with its end token. Rows sum to 1.

    Raises:
        ValueError: No such layer or method.
    """
    if method not in POSITIONS:
        raise ValueError(f"method must be one of {', '.join(POSITIONS)}, got {method!r}.")
    check_number("layer", layer, model.config.decoder_layers)
    ids = [(tokenizer(source)["input_ids"], tokenizer(translation)["input_ids"])]
    [(_, layers)] = _attentions(model, tokenizer, ids, budget=1)
    return layers[layer - 1, POSITIONS[method]]


def _tokenized(tokenizer: PreTrainedTokenizerBase, sources: list[str], translations: list[str]) -> dict[int, tuple]:
    """By its number, `words_of` either side of every pair that has words on both."""
    if len(sources) != len(translations):
        raise ValueError(f"As many sources as translations are needed, got {len(sources)} and {len(translations)}.")
    return {
        index: (words_of(tokenizer, source), words_of(tokenizer, translation))
        for index, (source, translation) in enumerate(zip(sources, translations))
        if source.strip() and translation.strip()
    }


def _agreement(links: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
    """Links in common, less those that would be if each target word took the link of a random one of its sentence."""
    counts, other_counts = (Counter(source for source, _ in side) for side in (links, others))
    by_chance = sum(counts[source] * other_counts[source] for source in counts) / len(links)
    return len(set(links) & set(others)) - by_chance


def best_layers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    batch_tokens: int = 4096,
) -> dict[str, int]:
    """The layers for "shift" and "naive", counted from 1, whose links agree most often on given pairs.

    After Chen et al. (2020), who choose a layer by the agreement of the two directions of translation. What two layers
    would share by chance does not count: those that look at the full stop from every word agree, but say nothing. A
    few pairs are enough.

    Args:
        model, tokenizer, sources, translations, batch_tokens: As for [`align`].

    Returns:
        `dict[str, int]`: Layers by method. Where no pair has words, they are the first.
    """
    pairs = list(_tokenized(tokenizer, sources, translations).values())
    ids = [(source[0], target[0]) for source, target in pairs]
    layers = range(model.config.decoder_layers)
    agreement = {(shift, naive): 0.0 for shift in layers for naive in layers}
    for index, weights in _attentions(model, tokenizer, ids, batch_tokens):
        (_, source_words), (_, target_words) = pairs[index]
        links = {
            method: [links_of(layer[positions], source_words, target_words[:-1]) for layer in weights]
            for method, positions in POSITIONS.items()
        }
        for shift, naive in agreement:
            agreement[shift, naive] += _agreement(links["shift"][shift], links["naive"][naive])
    shift, naive = max(agreement, key=agreement.get)
    return {"shift": shift + 1, "naive": naive + 1}


def align(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    layer: int | None = None,
    method: str = "shift",
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[tuple[int, int]]]:
    """Which word of its source each word of a translation comes from.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint, a fast one.
        sources, translations (`list[str]`): Raw text, as many of the one as of the other.
        layer (`int`, *optional*): Decoder layer, counted from 1. When not given, `best_layers` chooses by the first
            hundred pairs.
        method (`str`): "shift", "naive", or "both": the sum of the two, each in its own layer.
        batch_tokens (`int`): Tokens of a batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Moved on by one a pair.

    Returns:
        `list[list[tuple[int, int]]]`: For each pair, sorted links of a source word and a target word, counted from
        0 as `text.split()` has them; one for every word of the target (`links_of`). A pair with no word on one side
        has none.

    Raises:
        ValueError: No such layer or method; a layer for "both"; not as many sources as translations; a slow tokenizer.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if layer is not None and method == "both":
        raise ValueError('layer must not be given for "both", which takes two: they are chosen by their agreement.')
    pairs = _tokenized(tokenizer, sources, translations)
    if layer is None:
        sample = list(pairs)[:SAMPLE]
        chosen = ([texts[index] for index in sample] for texts in (sources, translations))
        layers = best_layers(model, tokenizer, *chosen, batch_tokens)
        layers = layers if method == "both" else {method: layers[method]}
        logger.info("Layers, by their agreement on %d pairs: %s.", len(sample), layers)
    else:
        layers = {method: check_number("layer", layer, model.config.decoder_layers)}
    links: list[list[tuple[int, int]]] = [[] for _ in sources]
    if progress is not None:
        progress.update(len(links) - len(pairs))
    indices, ids = list(pairs), [(source[0], target[0]) for source, target in pairs.values()]
    for position, weights in _attentions(model, tokenizer, ids, batch_tokens):
        (_, source_words), (_, target_words) = pairs[indices[position]]
        attention = sum(weights[layer - 1, POSITIONS[name]] for name, layer in layers.items())
        links[indices[position]] = links_of(attention, source_words, target_words[:-1])
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
    parser.add_argument("--layer", type=positive, help="decoder layer, from 1 (where shift and naive agree most)")
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="tokens of a batch (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    args = parser.parse_args(argv)
    translations, groups = read_parallel(args.translations, [args.sources])
    sources = [group[0] for group in groups]
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    with logging_redirect_tqdm(), tqdm(total=len(sources), unit=" pairs", desc="Aligning") as progress:
        options = (args.layer, args.method, args.batch_tokens, progress)
        results = align(model, tokenizer, sources, translations, *options)
    for links in results:
        print(*(f"{source}-{target}" for source, target in links))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
