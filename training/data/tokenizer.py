"""One BPE vocabulary for both languages (section 5.1 of the paper), in transformers' own fast tokenizer class.

The alphabet are the 256 bytes, so every Unicode text can be written with the vocabulary: there is no `<unk>`, and
decoding gives back exactly what was encoded.
"""

import copy
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast


PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2: the defaults of VaswaniConfig
SPECIAL_TOKENS = [PAD, BOS, EOS]
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
RAREST_PAIR = 2  # a token for what occurs once would never be learned


def train_tokenizer(texts: Iterable[str], vocab_size: int, show_progress: bool = True) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from sentences of both languages.

    Every sentence gets one leading space, which decoding takes away again: a word at the beginning is then the same
    token as in the middle. Encoding appends the end token, to sources as to targets.

    Args:
        texts (`Iterable[str]`): Sentences, of both languages.
        vocab_size (`int`): Entries at most: special tokens, bytes and merges. Small data may have fewer merges to
            learn; `len(tokenizer)` tells.
        show_progress (`bool`): Whether to draw a progress bar.

    Raises:
        ValueError: `vocab_size` has no room for the special tokens and the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} "
            f"({len(SPECIAL_TOKENS)} special tokens and 256 bytes), got {vocab_size}."
        )
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
        split_special_tokens=True,  # "</s>" in somebody's text is text, not the end of the sentence
    )


def extend_tokenizer(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], count: int) -> PreTrainedTokenizerFast:
    """Go on learning a byte-level BPE where it was left, from other sentences.

    The new merges come after all the old ones: a text is first cut as before, and what the new merges know in it is
    then joined. So every old token keeps its id and its text, and a text without any of the new pairs its tokens.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): With a byte-level BPE; it stays as it is.
        texts (`Iterable[str]`): Sentences, of both languages.
        count (`int`): Tokens to add at most; fewer where no more pairs of tokens occur twice.

    Returns:
        The extended tokenizer; the ids of its new tokens follow the highest old one.

    Raises:
        ValueError: It is another kind of tokenizer, or `count` is not positive.
    """
    if count < 1:
        raise ValueError(f"The vocabulary can be extended by at least 1 token, got {count}.")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    byte_level = model["type"] == "BPE" and alphabet <= model["vocab"].keys() and content["pre_tokenizer"] is not None
    if not byte_level or model["continuing_subword_prefix"]:
        raise ValueError(f"Only a byte-level BPE vocabulary can be extended, not this tokenizer's {model['type']}.")
    vocab = tokenizer.get_vocab()
    merges = _learn_merges(_count_words(tokenizer.backend_tokenizer, texts), vocab, count)
    first = max(vocab.values()) + 1
    model["vocab"] |= {left + right: first + i for i, (left, right) in enumerate(merges)}
    model["merges"] += merges
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = Tokenizer.from_str(json.dumps(content)).model
    return extended


def parts_of_new_tokens(tokenizer: PreTrainedTokenizerFast, extended: PreTrainedTokenizerFast) -> dict[int, list[int]]:
    """For the id of each token that `extend_tokenizer` has added, the ids of the old tokens it consists of."""
    old, new = (json.loads(one.backend_tokenizer.to_str())["model"]["merges"] for one in (tokenizer, extended))
    ids, parts = extended.get_vocab(), {}
    for pair in new[len(old) :]:
        parts[ids["".join(pair)]] = [part for token in pair for part in parts.get(ids[token], [ids[token]])]
    return parts


def _count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[tuple[str, ...]]:
    """How often each word occurs, as the tokens that it is cut into."""
    counts = Counter()
    for text in texts:
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    cut = Counter()
    for word, count in counts.items():
        cut[tuple(token.value for token in tokenizer.model.tokenize(word))] += count
    return cut


def _learn_merges(words: Counter[tuple[str, ...]], vocab: dict[str, int], count: int) -> list[tuple[str, str]]:
    """Up to `count` pairs of tokens to join, each time the most frequent; of equally frequent ones, that of the
    lowest ids, as `BpeTrainer` has it."""
    ids, first = dict(vocab), max(vocab.values()) + 1
    cut, often = [list(word) for word in words], list(words.values())
    pairs, places = Counter(), defaultdict(set)
    for i, word in enumerate(cut):
        for pair in pairwise(word):
            pairs[pair] += often[i]
            places[pair].add(i)

    def entry(pair):
        return -pairs[pair], ids[pair[0]], ids[pair[1]], pair

    queue = [entry(pair) for pair in pairs]
    heapq.heapify(queue)
    merges = []
    while queue and len(merges) < count:
        frequency, *_, pair = heapq.heappop(queue)
        # An entry of an earlier count has a newer one beside it. A text that is a token already is reached otherwise,
        # or is a special token's, which no text may become.
        if -frequency != pairs[pair] or pairs[pair] < RAREST_PAIR or "".join(pair) in ids:
            continue
        ids["".join(pair)] = first + len(merges)
        merges.append(pair)
        changed = set()
        for i in places.pop(pair):
            before, cut[i] = cut[i], _join(cut[i], pair)
            for old in pairwise(before):
                pairs[old] -= often[i]
                changed.add(old)
            for new in pairwise(cut[i]):
                pairs[new] += often[i]
                places[new].add(i)
                changed.add(new)
        for other in changed - {pair}:
            heapq.heappush(queue, entry(other))
    return merges


def _join(word: list[str], pair: tuple[str, str]) -> list[str]:
    """The tokens of a word, with each occurrence of the pair made one."""
    joined = []
    for token in word:
        if joined and (joined[-1], token) == pair:
            joined[-1] += token
        else:
            joined.append(token)
    return joined
