"""Merges of frequent pairs of tokens, as byte pair encoding learns them."""

import heapq
from collections import Counter, defaultdict
from itertools import pairwise


MIN_FREQUENCY = 2  # the embedding of a token that occurs once would hardly be trained


def learn_merges(
    words: Counter[tuple[str, ...]], vocab: dict[str, int], count: int, through_tokens: bool = False
) -> list[tuple[str, str]]:
    """Learn up to `count` merges, each of the most frequent pair of tokens.

    Ties are broken by the lowest token ids, as in `BpeTrainer`.

    Args:
        words (`Counter`): Frequency of each word, as a tuple of tokens.
        vocab (`dict[str, int]`): Id of each token.
        count (`int`): Maximum number of merges.
        through_tokens (`bool`): Also merge pairs whose text is a token of `vocab` or of an earlier merge. These merges
            are neither counted nor returned.
    """
    ids, first = dict(vocab), max(vocab.values()) + 1
    segmented, frequencies = [list(word) for word in words], list(words.values())
    pairs, words_with = Counter(), defaultdict(set)
    for i, word in enumerate(segmented):
        for pair in pairwise(word):
            pairs[pair] += frequencies[i]
            words_with[pair].add(i)

    def entry(pair):
        return -pairs[pair], ids.get(pair[0], first), ids.get(pair[1], first), pair

    queue = [entry(pair) for pair in pairs]
    heapq.heapify(queue)
    merges = []
    while queue and len(merges) < count:
        frequency, *_, pair = heapq.heappop(queue)
        # An entry with an outdated frequency is superseded by a newer one. A merge whose text is already a token would
        # duplicate that token or produce a special token, which plain text must not become.
        is_token = "".join(pair) in ids
        if -frequency != pairs[pair] or pairs[pair] < MIN_FREQUENCY or (is_token and not through_tokens):
            continue
        if not is_token:
            ids["".join(pair)] = first + len(merges)
            merges.append(pair)
        changed = set()
        for i in words_with.pop(pair):
            before, segmented[i] = segmented[i], _join(segmented[i], pair)
            for old in pairwise(before):
                pairs[old] -= frequencies[i]
                changed.add(old)
            for new in pairwise(segmented[i]):
                pairs[new] += frequencies[i]
                words_with[new].add(i)
                changed.add(new)
        for other in changed - {pair}:
            heapq.heappush(queue, entry(other))
    return merges


def _join(word: list[str], pair: tuple[str, str]) -> list[str]:
    """Merge each occurrence of the pair in the tokens of a word."""
    joined = []
    for token in word:
        if joined and (joined[-1], token) == pair:
            joined[-1] += token
        else:
            joined.append(token)
    return joined
