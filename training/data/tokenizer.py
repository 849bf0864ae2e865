"""Joint byte-level BPE vocabulary of both languages (section 5.1 of the paper), as a fast tokenizer of transformers.

The base alphabet is the 256 bytes, so every Unicode text can be encoded without `<unk>`, and decoding is lossless.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from .merges import learn_merges
from .pieces import extend_pieces, has_pieces, parts_of_new_pieces
from .two_sided_tokenizer import TwoSidedTokenizer


PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2: the defaults of VaswaniConfig
SPECIAL_TOKENS = [PAD, BOS, EOS]
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
# The pre-tokenisation of `pre_tokenizers.ByteLevel`, which has no public form.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, show_progress: bool = True) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from sentences of both languages.

    Encoding prepends a space to each sentence, so that a word has the same token at the beginning of a sentence as in
    the middle; decoding removes it. Encoding appends the end token to sources and targets alike.

    Args:
        texts (`Iterable[str]`): Sentences, of both languages.
        vocab_size (`int`): Maximum size of the vocabulary: special tokens, bytes and merges. Small data may yield
            fewer merges; `len(tokenizer)` is the actual size.
        show_progress (`bool`): Show a progress bar.

    Raises:
        ValueError: `vocab_size` is smaller than the number of special tokens and bytes.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", left=1, right=0)])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = (EOS, tokenizer.token_to_id(EOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" in the input text is plain text, not the end token
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError for a vocabulary without room for the special tokens and bytes."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} "
            f"({len(SPECIAL_TOKENS)} special tokens and 256 bytes), got {vocab_size}."
        )


def with_symbols(tokenizer: PreTrainedTokenizerFast, symbols: Iterable[str]) -> PreTrainedTokenizerFast:
    """Extend a byte-level BPE by symbols of linearised trees, each a token of its own.

    A bracket symbol is found only between spaces, so no part of a text becomes one by chance. Words and tags share
    tokens: a comma and its tag are the same one. Decoding puts the space before a symbol back.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): Output of `train_tokenizer`; it is not modified.
        symbols (`Iterable[str]`): Symbols without spaces, like `(NP`, `)NP` and `NN`.

    Returns:
        The tokenizer with the symbols as added tokens, which are neither special nor normalised. See `symbol_ids`.
    """
    symbols = sorted(set(symbols))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    model["ignore_merges"] = True  # a symbol has no merges; it is looked up whole
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [to_bytes.pre_tokenize_str(f" {symbol}")[0][0] for symbol in symbols]
    for token in tokens:
        model["vocab"].setdefault(token, len(model["vocab"]))
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = Tokenizer.from_str(json.dumps(content)).model
    alternatives = "|".join(map(re.escape, symbols))
    split = pre_tokenizers.Split(Regex(rf" (?:{alternatives})(?= |\z)|{WORDS}"), "isolated")
    extended.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    extended.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    return extended


def symbol_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Ids of the symbols of `with_symbols`, by symbol; empty if there are no brackets among the added tokens."""
    special = set(tokenizer.all_special_ids)
    added = sorted(set(tokenizer.get_added_vocab().values()) - special)
    symbols = {tokenizer.decode([token]).strip(" "): token for token in added}
    has_brackets = any(symbol[0] == "(" and f"){symbol[1:]}" in symbols for symbol in symbols if len(symbol) > 1)
    return symbols if has_brackets else {}


def extend_tokenizer(
    tokenizer: PreTrainedTokenizerFast, sources: Iterable[str], targets: Iterable[str], count: int
) -> PreTrainedTokenizerFast:
    """Extend a vocabulary by tokens learned from other sentences: byte-level BPE, or Unigram (SentencePiece).

    New merges of BPE rank below all old ones: they apply to the tokens that the old merges produce. For Unigram, see
    `extend_pieces`. Every old token keeps its text, and a text without new tokens keeps its old ones. Ids stay too,
    apart from those of tokens that only the sources of a model with two vocabularies have.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): Tokenizer to extend; it is not modified.
        sources, targets (`Iterable[str]`): Sentences of both languages.
        count (`int`): Maximum number of tokens to add; fewer are added if no further pair of tokens occurs twice.

    Returns:
        The extended tokenizer. The ids of the new tokens follow the highest old id of translations.

    Raises:
        ValueError: The tokenizer is of another kind, or `count` is not positive.
    """
    if count < 1:
        raise ValueError(f"The vocabulary can be extended by at least 1 token, got {count}.")
    if has_pieces(tokenizer):
        return extend_pieces(tokenizer, sources, targets, count)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    byte_level = model["type"] == "BPE" and alphabet <= model["vocab"].keys() and content["pre_tokenizer"] is not None
    if not byte_level or model["continuing_subword_prefix"] or isinstance(tokenizer, TwoSidedTokenizer):
        kind = f"{model['type']} of words that end in </w>" if model.get("end_of_word_suffix") else model["type"]
        raise ValueError(
            f"extend_vocabulary: expected a vocabulary of byte-level BPE or Unigram (SentencePiece), found {kind}."
        )
    vocab = tokenizer.get_vocab()
    merges = learn_merges(_count_words(tokenizer.backend_tokenizer, chain(sources, targets)), vocab, count)
    first = max(vocab.values()) + 1
    model["vocab"] |= {left + right: first + i for i, (left, right) in enumerate(merges)}
    model["merges"] += merges
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = Tokenizer.from_str(json.dumps(content)).model
    return extended


def parts_of_new_tokens(
    tokenizer: PreTrainedTokenizerFast, extended: PreTrainedTokenizerFast
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Map the id of each token added by `extend_tokenizer` to the ids of the old tokens that it consists of.

    Returns:
        The parts for sources and for targets. For sources, also the old id of each token whose id has changed.
    """
    if has_pieces(tokenizer):
        return parts_of_new_pieces(tokenizer, extended)
    old, new = (json.loads(t.backend_tokenizer.to_str())["model"]["merges"] for t in (tokenizer, extended))
    ids, parts = extended.get_vocab(), {}
    for pair in new[len(old) :]:
        parts[ids["".join(pair)]] = [part for token in pair for part in parts.get(ids[token], [ids[token]])]
    return parts, parts


def _count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Frequency of each pre-tokenised word, keyed by the tokens into which the tokenizer splits it."""
    counts = Counter()
    for text in texts:
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    segmented = Counter()
    for word, count in counts.items():
        segmented[tuple(token.value for token in tokenizer.model.tokenize(word))] += count
    return segmented
