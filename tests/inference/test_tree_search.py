"""The search of a parser finds well-formed trees only, and all of them, in every loop and for every sentence alone."""

import pytest
import torch
from transformers import LogitsProcessorList

from hf_vaswani.decoding_vaswani import gnmt_length_penalty
from support.models import BOS, EOS, noisy_translator
from training.data.tag_lexicon import TagLexicon
from training.data.tokenizer import symbol_ids, train_tokenizer, with_symbols
from training.data.trees import linearise, parse_tree, restore
from training.inference.forced_decoding import id_log_probabilities
from training.inference.search import Request, Sampling, Search
from training.inference.tree_search import TreeConstraint, TreeSymbols, tree_constraint


SENTENCES = ["cats sleep", "go", "the cat sees a dog", "dogs", "a dog sees the cat , again and again"]


@pytest.fixture(scope="module")
def tokenizer():
    words = train_tokenizer(SENTENCES * 3, vocab_size=270, show_progress=False)
    return with_symbols(words, ["(A", ")A", "(B", ")B", "(C", "X", ","])


@pytest.fixture(scope="module")
def model(tokenizer):
    return noisy_translator(tokenizer, num_beams=3, max_extra_tokens=6)


def requests(tokenizer, sentences=SENTENCES) -> list[Request]:
    ids = tokenizer(sentences)["input_ids"]
    return [Request(ids, key=(i,), words=text.split()) for i, (ids, text) in enumerate(zip(ids, sentences))]


def search_of(models, tokenizer, constrained: bool = True, **options) -> Search:
    search = Search(models, tokenizer, **options)
    search.constraint = tree_constraint(search) if constrained else None
    return search


def forests(words: int, room: int) -> list[list[str]]:
    """All sequences of at least one tree over so many words, in at most `room` symbols, by definition."""
    if words == 0 or words > room:
        return []
    found = []
    for first in range(1, words + 1):  # words of the first tree
        for head in trees(first, room - (words - first)):
            if first == words:
                found.append(head)
            else:
                found += [head + tail for tail in forests(words - first, room - len(head))]
    return found


def trees(words: int, room: int) -> list[list[str]]:
    tags = [["X"], [","]] if words == 1 and room >= 1 else []
    inner = forests(words, room - 2) if room > 2 else []
    return tags + [[f"({label}", *symbols, f"){label}"] for label in "AB" for symbols in inner]


@pytest.mark.parametrize(("words", "limit"), [(1, 2), (1, 3), (1, 4), (1, 7), (2, 5), (2, 6), (2, 8), (3, 6), (3, 9)])
def test_a_token_may_follow_if_and_only_if_some_tree_goes_on_so(model, tokenizer, words, limit):
    """The oracle enumerates all trees whose symbols and end token fit in the limit."""
    ids = symbol_ids(tokenizer)
    whole = [[BOS, *(ids[symbol] for symbol in tree), EOS] for tree in trees(words, limit - 1)]
    assert whole and min(map(len, whole)) == 1 + TreeConstraint.shortest(words)
    successors: dict[tuple[int, ...], set[int]] = {}
    for sequence in whole:
        for place in range(1, len(sequence)):
            successors.setdefault(tuple(sequence[:place]), set()).add(sequence[place])

    # The sentence is the second of three, of which the first has left.
    counts, limits = torch.tensor([9, words, 9]), torch.tensor([99, limit, 99])
    constraint = TreeConstraint(TreeSymbols.of(model, tokenizer), counts, limits)
    for length in {len(prefix) for prefix in successors}:
        prefixes = [prefix for prefix in successors if len(prefix) == length]
        rows = torch.tensor(prefixes * 2)
        scores = constraint.process(rows, torch.zeros(len(rows), len(tokenizer)), sentences=torch.tensor([1, 2]))
        for prefix, row in zip(prefixes, scores):
            assert set((row == 0).nonzero()[:, 0].tolist()) == successors[prefix], prefix
            assert ((row == 0) | (row == -torch.inf)).all()


def test_the_search_finds_the_likeliest_tree(model, tokenizer):
    """With room for all trees, beam search is exhaustive."""
    [request] = requests(tokenizer, ["cats sleep"])
    search = search_of([model], tokenizer, num_beams=600, max_extra_tokens=2)
    limit = len(request.ids) + 2
    ids = symbol_ids(tokenizer)
    every = trees(2, limit - 1)
    assert 50 < len(every) < 600
    sequences = [[*(ids[symbol] for symbol in tree), EOS] for tree in every]
    rows = id_log_probabilities(model, tokenizer, [request.ids] * len(every), sequences, 4096)
    alpha = model.generation_config.length_penalty
    scores = [sum(row) / gnmt_length_penalty(len(row), alpha) for row in rows]
    best = every[max(range(len(every)), key=scores.__getitem__)]
    assert search([request])[0][0].text.split() == best


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("models", [1, 2])
def test_every_loop_and_every_batch_finds_the_same_well_formed_trees(model, tokenizer, layouts, beams, models):
    ensemble = [noisy_translator(tokenizer, max_extra_tokens=9), model][-models:]
    fast = search_of(ensemble, tokenizer, num_beams=beams)
    batch = requests(tokenizer)
    layouts.clear()
    together = [row[0].text for row in fast(batch)]
    assert layouts  # the fast loop has packed the weights
    assert [fast([request])[0][0].text for request in batch] == together
    if models == 1:
        slow = search_of(ensemble, tokenizer, num_beams=beams, fast_decoding=False)
        assert [row[0].text for row in slow(batch)] == together
    for text, sentence in zip(together, SENTENCES):
        tree, counts = restore(text.split(), sentence.split())
        assert not counts and linearise(tree) == text.split()
    free = search_of(ensemble, tokenizer, constrained=False, num_beams=beams)
    assert any(restore(row[0].text.split(), sentence.split())[1] for row, sentence in zip(free(batch), SENTENCES))


LEXICON = "(A (X cats) (, sleep))\n" * 5 + "(A (X the) (X a) (X dog) (UH cat) (, ,))\n" * 5


@pytest.fixture
def lexicon(tmp_path):
    (tmp_path / "a.trees").write_text(LEXICON, encoding="utf-8")
    return TagLexicon([str(tmp_path / "a.trees")])


@pytest.mark.parametrize(
    ("words", "so_far", "tags"),
    [
        ("cats sleep", "(A", {"X"}),
        ("cats sleep", "(A X", {","}),
        ("a cats sleep", "(A X X", {","}),
        ("cat dogs", "(A", {"X", ","}),  # the only tag of `cat` is no symbol of the parser
        ("cat dogs", "(A X", {"X", ","}),  # an unknown word, and no word of the lexicon is rare
        ("cats sleep", "(A X ,", set()),
    ],
)
def test_a_word_may_have_the_tags_of_the_lexicon(model, tokenizer, lexicon, words, so_far, tags):
    ids = symbol_ids(tokenizer)
    batch = requests(tokenizer, ["the", words])
    constraint = tree_constraint(Search([model], tokenizer), lexicon)(batch)
    prefix = torch.tensor([[BOS, *(ids[symbol] for symbol in so_far.split())]])
    scores = constraint.process(prefix, torch.zeros(1, len(tokenizer)), sentences=torch.tensor([1]))
    assert {tag for tag in ("X", ",") if scores[0, ids[tag]] == 0} == tags


def test_trees_have_the_tags_of_the_lexicon(model, tokenizer, lexicon):
    search = Search([model], tokenizer, num_beams=6, n_best=4)
    search.constraint = tree_constraint(search, lexicon)
    known, seen = {"cats": "X", "sleep": ",", "the": "X", "a": "X", "dog": "X", ",": ","}, set()
    for rows, sentence in zip(search(requests(tokenizer)), SENTENCES):
        for row in rows:
            tree, mended = restore(row.text.split(), sentence.split())
            assert not mended
            seen |= set(zip(tree.words(), tree.tags()))
    assert {(word, tag) for word, tag in seen if word in known} == set(known.items())


def test_a_lexicon_of_other_tags_is_an_error(model, tokenizer, tmp_path):
    (tmp_path / "a.trees").write_text("(A (UH cats))\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no tag of the lexicon"):
        tree_constraint(Search([model], tokenizer), TagLexicon([str(tmp_path / "a.trees")]))


def test_samples_and_n_best_lists_are_well_formed(model, tokenizer):
    sampled = search_of([model], tokenizer, n_best=4, sampling=Sampling(seed=3))
    listed = search_of([model], tokenizer, n_best=3, scores=True)
    for search in (sampled, listed):
        for rows, sentence in zip(search(requests(tokenizer)), SENTENCES):
            assert all(not restore(row.text.split(), sentence.split())[1] for row in rows)
            assert len({row.text for row in rows}) > 1
    assert all(
        scores == sorted(scores, reverse=True)
        for scores in [[r.score for r in rows] for rows in listed(requests(tokenizer))]
    )


def test_an_opening_bracket_without_a_closing_one_is_excluded(model, tokenizer):
    constraint = TreeConstraint(TreeSymbols.of(model, tokenizer), torch.tensor([2]), torch.tensor([20]))
    scores = LogitsProcessorList([constraint])(torch.tensor([[BOS]]), torch.zeros(1, len(tokenizer)))
    assert set((scores[0] == 0).nonzero()[:, 0].tolist()) == {symbol_ids(tokenizer)[name] for name in ("(A", "(B")}


def test_symbols_are_whole_tokens_of_the_source_too(tokenizer):
    """The comma is a word and a tag; the words are counted all the same."""
    assert tokenizer.decode(tokenizer("a , b")["input_ids"], skip_special_tokens=True) == "a , b"
    assert parse_tree("(A (X a) (, ,))").tags() == ["X", ","]


def test_a_model_without_symbols_is_no_parser(tokenizer):
    words = train_tokenizer(SENTENCES, vocab_size=270, show_progress=False)
    model = noisy_translator(words)
    for vocabulary, found in ((words, "0 pairs"), (with_symbols(words, ["(A", ")A"]), "0 tags")):
        with pytest.raises(ValueError, match="parser") as error:
            TreeSymbols.of(model, vocabulary)
        assert found in str(error.value)


def test_outputs_need_a_limit(tokenizer):
    model = noisy_translator(tokenizer, max_extra_tokens=None)
    with pytest.raises(ValueError, match="limit") as error:
        tree_constraint(Search([model], tokenizer))
    assert "--max-extra-tokens" in str(error.value)
