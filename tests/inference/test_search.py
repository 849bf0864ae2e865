import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.models import noisy_translator
from training.inference.batches import by_threads, share_of_batches, token_batches
from training.inference.forced_decoding import TokenTexts, id_log_probabilities
from training.inference.search import Request, Sampling, Search
from training.inference.translation import translate


@pytest.fixture(scope="module")
def model(tokenizer):
    return noisy_translator(tokenizer, max_extra_tokens=8)


@pytest.fixture(scope="module")
def requests(tokenizer, pairs):
    return [Request(tokenizer(english)["input_ids"], key=(number,)) for number, (english, _) in enumerate(pairs[:6])]


def start(model) -> int:
    return model.generation_config.decoder_start_token_id


# Which process takes which batches


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 5))
def test_every_batch_is_of_one_process_and_all_have_as_much_to_do(lengths, processes):
    batches = list(token_batches(lengths, budget=100))
    shares = [share_of_batches(batches, lengths, rank, processes) for rank in range(processes)]
    assert sorted(batch for share in shares for batch in share) == sorted(batches)

    def padded(batch):
        return len(batch) * max(lengths[i] for i in batch)

    loads = [sum(map(padded, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(padded, batches), default=0)
    for share in shares:
        assert [padded(batch) for batch in share] == sorted(map(padded, share), reverse=True)


def test_weights_are_laid_out_once_for_all_batches(model, tokenizer, pairs, layouts):
    sentences = [english for english, _ in pairs[:6]]
    alone = [translate(model, tokenizer, [sentence])[0] for sentence in sentences]
    layouts.clear()
    assert translate(model, tokenizer, sentences, batch_tokens=1) == alone
    assert layouts == [model]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_on_a_cpu_two_batches_are_worked_on_at_once_and_results_come_in_order(two_threads):
    both = threading.Barrier(2, timeout=30)  # breaks if only one thread works

    def work(batch):
        both.wait()
        return batch, torch.get_num_threads()

    found = list(by_threads(work, [5, 3, 2, 1], torch.device("cpu")))
    assert found == [(5, 1), (3, 1), (2, 1), (1, 1)]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("batches", "device"), [([5], "cpu"), ([5, 3], "meta")])
def test_one_batch_or_an_accelerator_is_for_one_thread(batches, device, two_threads):
    threads = set(by_threads(lambda batch: threading.get_ident(), batches, torch.device(device)))
    assert threads == {threading.get_ident()}


def test_an_error_in_a_thread_is_raised_and_the_threads_are_given_back(two_threads):
    def work(batch):
        raise ValueError(f"batch {batch}")

    with pytest.raises(ValueError, match="batch 7"):
        list(by_threads(work, [7, 8, 9], torch.device("cpu")))
    assert torch.get_num_threads() == 2


def test_translations_do_not_depend_on_the_threads(model, tokenizer, pairs, two_threads):
    sentences = [english for english, _ in pairs[:20]]
    found = translate(model, tokenizer, sentences, batch_tokens=24, num_beams=3)
    torch.set_num_threads(1)
    assert found == translate(model, tokenizer, sentences, batch_tokens=24, num_beams=3)


# Scores and log probabilities


@torch.no_grad()
def test_the_n_best_and_their_scores_are_those_of_the_librarys_own_loop(model, tokenizer, requests):
    search = Search([model], tokenizer, n_best=3, num_beams=4, scores=True, log_probabilities=True)
    for request, translations in zip(requests, search(requests)):
        expected = model.generate(
            torch.tensor([request.ids]),
            num_beams=4,
            num_return_sequences=3,
            fast_decoding=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        texts = tokenizer.batch_decode(expected.sequences, skip_special_tokens=True)
        assert [translation.text for translation in translations] == texts
        scores = [translation.score for translation in translations]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        assert scores == sorted(scores, reverse=True)
        for translation in translations:  # the paper's length penalty, of the checkpoint's generation config
            penalty = ((5 + len(translation.tokens)) / 6) ** 0.6
            assert translation.score == pytest.approx(translation.log_probability / penalty, abs=1e-3)


@torch.no_grad()
def test_log_probabilities_are_of_the_tokens_that_were_produced(model, tokenizer, requests):
    """Which the text alone does not give: noise is not tokenised as it was generated."""
    search = Search([model], tokenizer, log_probabilities=True, num_beams=1)
    retokenised = 0
    for request, [translation] in zip(requests, search(requests)):
        ids = model.generate(torch.tensor([request.ids]), num_beams=1)[0, 1:]
        loss = model(torch.tensor([request.ids]), labels=ids[None]).loss.item()
        assert len(translation.tokens) == len(ids)
        assert translation.log_probability == pytest.approx(-loss * len(ids), abs=1e-3)
        retokenised += tokenizer(translation.text)["input_ids"] != ids.tolist()
    assert retokenised


def test_greedy_search_scores_by_log_probability(model, tokenizer, requests):
    search = Search([model], tokenizer, scores=True, num_beams=1)
    for [translation] in search(requests):
        assert translation.score == pytest.approx(translation.log_probability)
        assert translation.score < 0


def test_the_texts_of_tokens_make_the_text(tokenizer):
    texts = TokenTexts(tokenizer)
    ids = tokenizer("A dog, a cat.")["input_ids"]
    assert "".join(texts[token] for token in ids) == " A dog, a cat.</s>"


def test_forced_decoding_does_not_depend_on_the_batch(model, tokenizer, requests):
    sources = [request.ids for request in requests]
    targets = [[5, 6, 7, 2], [300, 2], [9], [4] * 20, [2], [8, 9]]
    together = id_log_probabilities(model, tokenizer, sources, targets)
    assert [len(row) for row in together] == [4, 2, 1, 20, 1, 2]
    for source, target, row in zip(sources, targets, together):
        [alone] = id_log_probabilities(model, tokenizer, [source], [target])
        assert row == pytest.approx(alone, abs=1e-4)


def test_more_translations_than_beams_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match=r"n_best=3 .*num_beams=2"):
        Search([model], tokenizer, n_best=3)


# Prefixes


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_translations_begin_with_their_prefix(model, tokenizer, requests, beams):
    """And go on as the library's own loop does."""
    prefixes = [[], [300], [301, 7], [302, 8], [303], []]
    wanted = [Request(request.ids, prefix) for request, prefix in zip(requests, prefixes)]
    search = Search([model], tokenizer, num_beams=beams, n_best=beams, scores=True)
    batches = search.batches(wanted)
    assert sorted(map(sorted, batches)) == [[0, 5], [1, 4], [2, 3]]
    for batch in batches:
        for index, translations in zip(batch, search([wanted[i] for i in batch])):
            expected = model.generate(
                torch.tensor([wanted[index].ids]),
                attention_mask=torch.ones(1, len(wanted[index].ids), dtype=torch.long),
                decoder_input_ids=torch.tensor([[start(model), *prefixes[index]]]),
                num_beams=beams,
                num_return_sequences=beams,
                fast_decoding=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
            texts = tokenizer.batch_decode(expected.sequences, skip_special_tokens=True)
            assert [translation.text for translation in translations] == texts
            assert texts[0].startswith(tokenizer.decode(prefixes[index]))
            if beams > 1:
                scores = [translation.score for translation in translations]
                assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@torch.no_grad()
def test_the_likeliest_translations_own_beginning_changes_nothing(model, tokenizer, requests):
    """Nor where it ends, which a prefix counts for."""
    search = Search([model], tokenizer, num_beams=1, log_probabilities=True)
    for request, [expected] in zip(requests, search(requests)):
        ids = model.generate(torch.tensor([request.ids]), num_beams=1)[0, 1:].tolist()
        [[found]] = search([Request(request.ids, prefix=ids[:3])])
        assert found.text == expected.text
        assert found.log_probability == pytest.approx(expected.log_probability, abs=1e-3)
        assert len(found.tokens) <= search.longest_output(len(request.ids)) == len(request.ids) + 8


# Sampling


def texts(groups) -> list[list[str]]:
    return [[translation.text for translation in group] for group in groups]


def test_a_sentences_samples_do_not_depend_on_its_batch(model, tokenizer, requests):
    search = Search([model], tokenizer, n_best=3, sampling=Sampling(seed=7))
    together = texts(search(requests))
    assert together == [texts(search([request]))[0] for request in requests]
    assert all(len(set(group)) == 3 for group in together)
    torch.manual_seed(99)
    assert texts(search(requests[::-1]))[::-1] == together
    assert texts(Search([model], tokenizer, n_best=3, sampling=Sampling(seed=6))(requests)) != together


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_the_narrowest_sampling_is_greedy_search(model, tokenizer, requests, limits):
    greedy = texts(Search([model], tokenizer, num_beams=1)(requests))
    assert texts(Search([model], tokenizer, sampling=Sampling(**limits))(requests)) == greedy


@torch.no_grad()
def test_tokens_are_drawn_as_often_as_they_are_likely(model, tokenizer, requests):
    request, draws = requests[0], 3000
    logits = model(torch.tensor([request.ids]), decoder_input_ids=torch.tensor([[start(model)]])).logits[0, 0]
    for sampling in (Sampling(temperature=0.7), Sampling(temperature=2.0, top_k=5)):
        scaled = logits / sampling.temperature
        if sampling.top_k is not None:
            scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -math.inf
        expected = scaled.softmax(-1)
        search = Search([model], tokenizer, n_best=draws, sampling=sampling, max_new_tokens=1)
        sequences, _ = search._generate([request])
        counts = torch.bincount(torch.tensor([row[1] for row in sequences]), minlength=len(expected))
        error = (counts / draws - expected).abs()
        assert (error <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-6 + 5 / draws).all()
        assert counts[expected == 0].sum() == 0
        assert (counts > 0).sum() >= 3


@torch.no_grad()
def test_a_samples_score_is_its_log_probability_whatever_the_temperature(model, tokenizer, requests):
    search = Search([model], tokenizer, n_best=2, sampling=Sampling(temperature=3.0), scores=True)
    for translation in search(requests[:1])[0]:
        assert translation.score == pytest.approx(translation.log_probability)
    [[_, *ids], _], _ = search._generate(requests[:1])
    ids = ids[: ids.index(2) + 1] if 2 in ids else ids
    loss = model(torch.tensor([requests[0].ids]), labels=torch.tensor([ids])).loss.item()
    assert search(requests[:1])[0][0].score == pytest.approx(-loss * len(ids), abs=1e-3)


# Ensembles


class Recorder:
    """In the place of `generate()`."""

    def __init__(self, model):
        self.generate, self.calls = model.generate, []

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return self.generate(**{name: value for name, value in kwargs.items() if name != "ensemble"})


def test_other_models_decode_together_with_the_first(tokenizer, requests, monkeypatch):
    models = [noisy_translator(tokenizer, max_extra_tokens=8) for _ in range(3)]
    recorder = Recorder(models[0])
    monkeypatch.setattr(models[0], "generate", recorder)
    Search(models, tokenizer)(requests)
    assert recorder.calls[-1]["ensemble"] == models[1:]
    Search(models[:1], tokenizer)(requests)
    assert "ensemble" not in recorder.calls[-1]
    with pytest.raises(ValueError, match="single model, got an ensemble of 3"):
        Search(models, tokenizer, log_probabilities=True)
    Search(models, tokenizer, scores=True)  # those of beam search
