"""Extension of Unigram vocabularies, those of SentencePiece, by characters and pieces learned from other text.

Unigram takes the segmentation with the highest sum of scores. The score of a new piece is the sum of its parts in the
old segmentation, and a bonus for each boundary between them. The bonus is too small to change the order of different
sums: new pieces replace the old pieces of which they consist, in the way that leaves the fewest.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice

from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from .merges import MIN_FREQUENCY, learn_merges
from .two_sided_tokenizer import TARGET_VOCAB_SIZE, TwoSidedTokenizer


SPACE = "▁"
# Scores of SentencePiece are float32, so different sums of usual scores differ by 2^-23 or more.
BONUS = 2.0**-32
BATCH = 1000  # texts


def has_pieces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the vocabulary is one of Unigram."""
    return isinstance(tokenizer.backend_tokenizer.model, Unigram)


def run_boundaries(characters: Iterable[str]) -> normalizers.Normalizer:
    """Put spaces around each run of characters that SentencePiece does not know, so that no piece matches its parts.

    Args:
        characters (`Iterable[str]`): Characters that are pieces.
    """
    points = "".join(rf"\x{{{ord(character):X}}}" for character in sorted(characters))
    known, other = f"[{points}]", f"[^{points}]"
    pattern = rf"(?<={known})(?={other})|(?<={other})(?={known})|(?<={other})\z"
    return normalizers.Replace(Regex(pattern), " ")


def extend_pieces(
    tokenizer: PreTrainedTokenizerFast, sources: Iterable[str], targets: Iterable[str], count: int
) -> PreTrainedTokenizerFast:
    """Extend a Unigram vocabulary by unknown characters, the most frequent first, and then by pieces.

    Pieces are merges of frequent neighbours within words, digits or punctuation. Each side is segmented by its own
    tokenizer, and both get all new tokens, with the same ids. These follow the tokens that the model writes; tokens of
    sources only, of a model with two vocabularies, move behind them. A single character or a run of characters that
    only the other side knew becomes an ordinary piece; pieces of `target_tokenizer.json` that the vocabulary lacks are
    left out, so that translations are written without them.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): Tokenizer with one side or two; it is not modified.
        sources, targets (`Iterable[str]`): Sentences of both languages.
        count (`int`): Maximum number of tokens to add. What occurs once is not added.

    Raises:
        ValueError: The vocabulary has byte fallback, no unknown token, or added tokens that are no pieces.
    """
    first, sides = _written(tokenizer), _sides(tokenizer)
    for side in sides:
        _check(side)
    opened = opened_sides(tokenizer)
    texts = [sources, targets] if len(sides) == 2 else [chain(sources, targets)]
    words = [_count_words(side, lines, tokenizer.split_special_tokens) for side, lines in zip(opened, texts)]
    known = [side.get_vocab().keys() for side in opened]
    unknown = Counter()
    for of_side, counted in zip(known, words):
        for word, frequency in counted.items():
            unknown.update({unit: frequency * n for unit, n in Counter(word).items() if unit not in of_side})
    by_frequency = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    characters = [character for character, n in by_frequency if n >= MIN_FREQUENCY][:count]

    ids = {token: i for side in opened for token, i in side.get_vocab().items() if i < first}
    ids |= {character: first + i for i, character in enumerate(characters)}
    kept = Counter()
    for of_side, counted in zip(known, words):
        kept.update(_without_unknown(counted, of_side | set(characters)))
    merges = learn_merges(kept, ids, count - len(characters), through_tokens=True)
    new = [*characters, *map("".join, merges)]
    return _assembled(tokenizer, [_with_tokens(side, new, first, i == 0) for i, side in enumerate(sides)], len(new))


def opened_sides(tokenizer: PreTrainedTokenizerFast) -> list[Tokenizer]:
    """Both sides, or the only one, with the old ids, as `extend_pieces` extends them."""
    first = _written(tokenizer)
    return [_with_tokens(side, [], first, i == 0) for i, side in enumerate(_sides(tokenizer))]


def parts_of_new_pieces(
    tokenizer: PreTrainedTokenizerFast, extended: PreTrainedTokenizerFast
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Old tokens of each token behind those that the old model wrote.

    Returns:
        The old ids by the new one, in the segmentation of sources, and in that of targets. A new character has one
        part, the unknown token; so has a token of sources that moved, its old id.
    """
    old = opened_sides(tokenizer)
    first, last = _written(tokenizer), _written(extended)
    read = {i: token for token, i in extended.backend_tokenizer.get_vocab().items() if i >= first}
    of_sources = {i: _old_ids(old[0], token) for i, token in read.items()}
    return of_sources, {i: _old_ids(old[-1], read[i]) for i in range(first, last)}


def _old_ids(side: Tokenizer, token: str) -> list[int]:
    old = side.token_to_id(token)
    return [old] if old is not None else [part.id for part in side.model.tokenize(token)]


def _written(tokenizer: PreTrainedTokenizerFast) -> int:
    """Number of tokens that the model writes."""
    return tokenizer.target_vocab_size if isinstance(tokenizer, TwoSidedTokenizer) else len(tokenizer)


def _sides(tokenizer: PreTrainedTokenizerFast) -> list[Tokenizer]:
    if isinstance(tokenizer, TwoSidedTokenizer):
        return [tokenizer.backend_tokenizer, tokenizer.target_side.backend_tokenizer]
    return [tokenizer.backend_tokenizer]


def _check(side: Tokenizer) -> None:
    """Raise ValueError for a vocabulary that cannot be extended."""
    content = json.loads(side.to_str())
    model = content["model"]
    pieces = {piece for piece, _ in model["vocab"]}
    added = [token["content"] for token in content["added_tokens"] if token["content"] not in pieces]
    for problem, is_found in (
        ("byte fallback", model["byte_fallback"]),
        ("no unknown token", model["unk_id"] is None),
        (f"an added token that is no piece, {''.join(added[:1])!r}", added),
    ):
        if is_found:
            raise ValueError(f"extend_vocabulary: a Unigram vocabulary with {problem} cannot be extended.")


def _count_words(side: Tokenizer, texts: Iterable[str], split_special: bool) -> Counter[tuple[str, ...]]:
    """Frequency of each word, as a tuple of pieces and unknown characters."""
    side.encode_special_tokens = split_special
    unknown = json.loads(side.to_str())["model"]["unk_id"]
    added = set(side.get_added_tokens_decoder()) - {unknown}
    counts = Counter()
    texts = iter(texts)
    while lines := list(islice(texts, BATCH)):
        for encoding in side.encode_batch(lines, add_special_tokens=False):
            units = []
            for i, token in zip(encoding.ids, encoding.tokens):
                if i == unknown:
                    units += token.strip(" ")  # without the spaces of `run_boundaries`
                else:
                    units.append(None if i in added else token)
            counts.update(_words(units))
    return counts


def _words(units: list[str | None]) -> Iterator[tuple[str, ...]]:
    """Cut the pieces of a text at spaces, at added tokens (`None`), and where letters, digits and others meet."""
    word = []
    for unit in units:
        is_whole = unit is None or unit.isspace() or SPACE in unit[1:]  # nothing is merged with it
        if word and (is_whole or unit[0] == SPACE or (word[-1] != SPACE and _kind(word[-1][-1]) != _kind(unit[0]))):
            yield tuple(word)
            word = []
        if not is_whole:
            word.append(unit)
    if word:
        yield tuple(word)


def _kind(character: str) -> str:
    category = unicodedata.category(character)[0]
    return {"M": "L", "L": "L", "N": "N"}.get(category, "other")


def _without_unknown(words: Counter[tuple[str, ...]], known: set[str]) -> Counter[tuple[str, ...]]:
    """Words cut at units that are neither tokens nor new characters."""
    cut = Counter()
    for word, frequency in words.items():
        for is_known, units in groupby(word, known.__contains__):
            if is_known:
                cut[tuple(units)] += frequency
    return cut


def _with_tokens(side: Tokenizer, new: list[str], first: int, keep_rest: bool) -> Tokenizer:
    """Insert tokens at the id `first`. Characters of the other language become known.

    Args:
        side (`tokenizers.Tokenizer`): Tokenizer of one side; it is not modified.
        new (`list[str]`): New characters and pieces.
        first (`int`): Number of tokens that the model writes.
        keep_rest (`bool`): Keep the other tokens from `first` on, behind the new ones.
    """
    content = json.loads(side.to_str())
    old = content["model"]["vocab"]
    unknown = old[content["model"]["unk_id"]][0]
    steps = (content["normalizer"] or {}).get("normalizers", [])
    before = {token for token, _ in old if len(token) == 1}
    cut_at_runs = _as_json(run_boundaries(before))
    runs = {token for token, _ in old if token.startswith(" ") and cut_at_runs in steps}
    bare = {token: token.strip(" ") for token in runs}
    is_new = set(new).__contains__
    moved = [token for token, _ in old[first:] if keep_rest and not is_new(bare.get(token, token))]
    table = [*(token for token, _ in old[:first]), *new, *moved]
    known = {token for token in (bare.get(token, token) for token in table) if len(token) == 1}
    # A run with a character that is unknown yet is found as a whole only.
    tokens = [bare[token] if token in runs and known.issuperset(bare[token]) else token for token in table]
    scores = _scores(dict(map(tuple, old)), tokens, before, unknown)
    ids = {token: i for i, token in enumerate(scores)}
    content["model"] |= {"vocab": [*map(list, scores.items())], "unk_id": ids[unknown]}
    for token in content["added_tokens"]:
        token["id"] = ids[token["content"]]
    if cut_at_runs in steps:
        steps = [_as_json(run_boundaries(known)) if step == cut_at_runs else step for step in steps]
        content["normalizer"]["normalizers"] = [step for step in steps if not _guards_known_name(step, known)]
    return Tokenizer.from_str(json.dumps(content))


def _scores(old: dict[str, float], tokens: list[str], characters: set[str], unknown: str) -> dict[str, float]:
    """Scores of old and new tokens. New characters have the lowest score of the known ones."""
    lowest = min((old[character] for character in characters), default=min(old.values()))
    scores = {token: old.get(token, lowest) for token in tokens if token in old or len(token) == 1}
    model = Unigram([*scores.items()], [*scores].index(unknown), False)

    def score(token: str) -> float:
        parts = [part.value for part in model.tokenize(token)]
        if not scores.keys() >= set(parts):
            return min(old.values())
        return sum(scores[part] for part in parts) + BONUS * (len(parts) - 1)

    return {token: scores[token] if token in scores else score(token) for token in tokens}


def _as_json(normalizer: normalizers.Normalizer) -> dict:
    return json.loads(normalizer.__getstate__())


def _guards_known_name(step: dict, known: set[str]) -> bool:
    """Whether a step cuts the name of a special token that consists of unknown characters no more."""
    name = step.get("pattern", {}).get("String", "")
    return bool(name) and step["content"] == f"{name[0]} {name[1:]}" and not known.isdisjoint(name)


def _assembled(tokenizer: PreTrainedTokenizerFast, sides: list[Tokenizer], count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of new sides with the settings of an old one."""
    own = {"added_tokens_decoder", TARGET_VOCAB_SIZE, *tokenizer.vocab_files_names}
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in own}
    extended = PreTrainedTokenizerFast(tokenizer_object=sides[0], **settings)
    return TwoSidedTokenizer(extended, sides[1], _written(tokenizer) + count) if len(sides) == 2 else extended
