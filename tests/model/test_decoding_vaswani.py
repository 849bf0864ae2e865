"""The fast loops against the library's own."""

import copy
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import hf_vaswani.generation_vaswani as generation
import hf_vaswani.kernels_vaswani as kernels
from hf_vaswani.decoding_vaswani import SentenceProcessor, StepDecoder
from support.models import EOS, PAD, batch_of, noisy_model, tiny_model


SEARCHES = [
    {},
    {"length_penalty_form": "gnmt", "length_penalty": 0.6},
    {"length_penalty": 2.0, "early_stopping": True},
    {"length_penalty": -1.0, "early_stopping": "never"},
    {"length_penalty_form": "gnmt", "length_penalty": -0.4},
    {"length_penalty": 1.3, "early_stopping": "never"},
]
LENGTHS = [{"max_extra_tokens": 3}, {"max_new_tokens": 12}, {"max_extra_tokens": 0}, {"max_length": 40}]
PROCESSORS = [
    {},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 4},
    {"repetition_penalty": 1.5},
    {"bad_words_ids": [[5], [6, 7]]},
    {"suppress_tokens": [8, 9], "forced_bos_token_id": 4},
    {"forced_eos_token_id": EOS, "remove_invalid_values": True},
]


def case(seed: int) -> tuple[torch.nn.Module, dict]:
    """A random model, batch and way of generating."""
    torch.manual_seed(seed)
    model = noisy_model(seed)
    if seed % 9 == 8:
        model = model.double()
    inputs = batch_of(torch.randint(1, 14, (int(torch.randint(1, 8, ())),)).tolist())
    if seed % 5 == 4:
        inputs.pop("attention_mask")
    num_beams = (1, 2, 4, 5)[seed % 4]
    options = {"num_beams": num_beams, **SEARCHES[seed % 6], **LENGTHS[seed // 2 % 4], **PROCESSORS[seed % 7]}
    if seed % 4 == 3 or seed % 11 == 0:
        start = torch.full((len(inputs["input_ids"]), 1), model.config.decoder_start_token_id)
        options["decoder_input_ids"] = torch.cat((start, torch.randint(3, 38, (len(start), 1 + seed % 3))), dim=1)
    if num_beams > 1 and seed % 3 == 2:
        options["num_return_sequences"] = 2
    return model, {**inputs, **options}


def compare(seed: int, monkeypatch) -> None:
    model, options = case(seed)
    steps = []
    real = StepDecoder.step
    monkeypatch.setattr(StepDecoder, "step", lambda self, tokens: steps.append(1) or real(self, tokens))
    expected = model.generate(**options, fast_decoding=False)
    assert not steps
    found = model.generate(**options)
    assert steps
    assert found.tolist() == expected.tolist()
    if options["num_beams"] > 1:
        expected = model.generate(
            **options, fast_decoding=False, return_dict_in_generate=True, output_scores=True
        ).sequences_scores
        found = model.generate(**options, return_dict_in_generate=True).sequences_scores
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Every option of a case, with one beam and with several.
SEEDS = (0, 4, 7, 8, 12, 13, 16, 17, 20, 22, 24, 26, 30, 39)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fast_loops_give_what_the_library_gives(seed, monkeypatch):
    compare(seed, monkeypatch)


@pytest.mark.slow
def test_the_fast_loops_give_what_the_library_gives_hundreds_of_times(monkeypatch):
    for seed in range(542):
        with monkeypatch.context() as patch:
            compare(seed, patch)


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if case(seed)[1]["num_beams"] > 1])
def test_waiting_sentences_take_the_places_of_finished_ones(seed, monkeypatch):
    monkeypatch.setattr(generation, "ROWS", 5)  # one or two sentences at once
    compare(seed, monkeypatch)


def test_sentences_that_begin_later_give_what_they_give_alone(monkeypatch):
    model, lengths = noisy_model(6), [7, 2, 9, 4, 1, 6, 3, 8, 5, 2, 12]
    options = {"num_beams": 3, "length_penalty_form": "gnmt", "length_penalty": 0.6, "max_extra_tokens": 4}
    inputs = batch_of(lengths)
    options |= {"return_dict_in_generate": True, "num_return_sequences": 2}
    begun, real = [], StepDecoder.replace
    monkeypatch.setattr(StepDecoder, "replace", lambda self, ended: begun.append(len(ended)) or real(self, ended))
    whole = model.generate(**inputs, **options)
    assert not begun
    monkeypatch.setattr(generation, "ROWS", 9)  # three sentences at once
    found = model.generate(**inputs, **options)
    assert sum(begun) == len(lengths) - 3
    assert found.sequences.tolist() == whole.sequences.tolist()
    assert found.beam_indices.tolist() == whole.beam_indices.tolist()
    torch.testing.assert_close(found.sequences_scores, whole.sequences_scores)


def test_a_finished_sentence_does_not_run_out_of_learned_positions(monkeypatch):
    """Ten of eleven sentences end early, and ten longer ones begin; the eleventh ends, and waits."""
    model = _learned_model()
    options = {**batch_of([2] * 10 + [8] * 12), "num_beams": 2, "max_extra_tokens": 0}
    expected = model.generate(**options).tolist()
    monkeypatch.setattr(generation, "ROWS", 22)
    assert model.generate(**options).tolist() == expected


def test_long_outputs_outgrow_the_cache_many_times():
    model = noisy_model(3)
    options = {**batch_of([3, 5, 2]), "num_beams": 4, "max_new_tokens": 120, "suppress_tokens": [EOS, PAD]}
    assert model.generate(**options).tolist() == model.generate(**options, fast_decoding=False).tolist()


def test_few_possible_tokens_give_what_the_library_gives():
    options = {**batch_of([3, 2]), "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 1}
    for more in ({"forced_bos_token_id": 9}, {"suppress_tokens": list(range(3, 38))}):
        found = noisy_model(7).generate(**options, **more)
        assert found.tolist() == noisy_model(7).generate(**options, **more, fast_decoding=False).tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("biased", [["v_proj"], ["q_proj", "v_proj"]])
def test_a_bias_in_some_projections_counts(biased, num_beams):
    model, options = noisy_model(8), {**batch_of([4, 3]), "num_beams": num_beams, "max_new_tokens": 6}
    for name in biased:
        projection = model.model.decoder.layers[0].self_attn.get_submodule(name)
        projection.bias = torch.nn.Parameter(3 * torch.randn(projection.out_features))
    expected = model.generate(**options, fast_decoding=False)
    assert model.generate(**options).tolist() == expected.tolist()
    assert expected.tolist() != noisy_model(8).generate(**options).tolist()


@pytest.mark.parametrize("position_embedding", ["sinusoidal", "learned"])
@torch.no_grad()
def test_a_step_equals_the_decoder(position_embedding):
    """Two beams that go on from one and the same, against the whole model on the whole prefix."""
    model = noisy_model(5) if position_embedding == "sinusoidal" else _learned_model()
    source = batch_of([5, 3])
    states = model.get_encoder()(**source)[0]
    decoder = StepDecoder(model, states, source["attention_mask"])
    prefixes = torch.tensor([[[1]], [[1]]])
    for parents, tokens in (
        (None, None),
        ([[0, 0], [0, 0]], [[4, 5], [6, 7]]),
        ([[1, 0], [1, 1]], [[8, 9], [3, 4]]),
        ([[1, 0], [0, 1]], [[5, 6], [9, 9]]),
    ):
        if parents is not None:
            parents, tokens = torch.tensor(parents), torch.tensor(tokens)
            decoder.reorder(parents)
            history = prefixes.gather(1, parents[..., None].expand(-1, -1, prefixes.shape[-1]))
            prefixes = torch.cat((history, tokens[..., None]), dim=-1)
        beams = prefixes.shape[1]
        repeated = {name: tensor.repeat_interleave(beams, 0) for name, tensor in source.items()}
        expected = model.model(**repeated, decoder_input_ids=prefixes.flatten(0, 1)).last_hidden_state[:, -1]
        torch.testing.assert_close(decoder.step(prefixes[..., -1]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_fixed_weights_are_laid_out_once_for_all_calls(num_beams, layouts):
    model, other = noisy_model(8), noisy_model(9)
    options = {**batch_of([4, 3]), "num_beams": num_beams, "max_new_tokens": 6}
    slow = model.generate(**options, fast_decoding=False).tolist()
    ensemble = model.generate(**options, ensemble=[other]).tolist()
    assert layouts == [model, other]
    with model.fixed_weights(), other.fixed_weights():
        assert [model.generate(**options).tolist() for _ in range(3)] == [slow] * 3
        assert model.generate(**options, ensemble=[other]).tolist() == ensemble
    assert layouts == [model, other, model, other]


@pytest.mark.parametrize("sentences, is_packed", [(1, False), (2, True)])
def test_weights_are_not_packed_for_a_single_sentence(sentences, is_packed, monkeypatch):
    packed = Mock(side_effect=kernels.PackedLinear)
    monkeypatch.setattr(kernels, "PackedLinear", packed)
    noisy_model(8).generate(**batch_of([4] * sentences), num_beams=4, max_new_tokens=3)
    assert packed.called == is_packed


def test_behind_fixed_weights_changes_are_seen(layouts):
    model, options = noisy_model(8), {**batch_of([4, 3]), "max_new_tokens": 6}
    with model.fixed_weights():
        before = model.generate(**options).tolist()
    with torch.no_grad():
        model.model.decoder.layers[0].self_attn.v_proj.weight.add_(1)
    after = model.generate(**options).tolist()
    assert after == model.generate(**options, fast_decoding=False).tolist() != before
    assert layouts == [model, model]


def test_fixed_weights_last_until_the_last_of_several_users_is_done(layouts):
    model, options = noisy_model(8), {**batch_of([4, 3]), "max_new_tokens": 6}
    first, second = model.fixed_weights(), model.fixed_weights()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model.generate(**options)
    assert layouts == [model]
    second.__exit__(None, None, None)
    model.generate(**options)
    assert layouts == [model, model]


def test_copies_of_a_model_have_weights_of_their_own(layouts, tmp_path):
    model, options = noisy_model(8), {**batch_of([4, 3]), "max_new_tokens": 6}
    with model.fixed_weights():
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
    before = twin.generate(**options).tolist()
    assert torch.load(tmp_path / "model.pt", weights_only=False).generate(**options).tolist() == before
    with torch.no_grad():
        twin.model.decoder.layers[0].self_attn.v_proj.weight.add_(1)
    assert twin.generate(**options).tolist() == twin.generate(**options, fast_decoding=False).tolist() != before


def test_weights_that_could_not_be_laid_out_are_not_remembered(monkeypatch):
    model, options = noisy_model(8), {**batch_of([4, 3]), "max_new_tokens": 6}
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(generation, "DecoderWeights", Mock(side_effect=MemoryError))
        model.fixed_weights().__enter__()
    with model.fixed_weights():
        pass
    assert model not in generation.PACKED
    assert model.generate(**options).tolist() == model.generate(**options, fast_decoding=False).tolist()


def test_weights_that_the_fast_loops_do_not_know_are_not_laid_out(layouts):
    model, options = noisy_model(8), {**batch_of([4, 3]), "max_new_tokens": 6}
    expected = model.generate(**options, fast_decoding=False).tolist()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output)
    with model.fixed_weights():
        assert model.generate(**options).tolist() == expected
    assert layouts == []


def _learned_model():

    return tiny_model(position_embedding="learned", max_position_embeddings=9)


class MeanOfModels(LogitsProcessor):
    """The mean of the probabilities of other models and the one that searches, each read from the start again."""

    def __init__(self, models, inputs):
        self.models, self.inputs = models, inputs

    def __call__(self, input_ids, scores):
        repeats = len(input_ids) // len(self.inputs["input_ids"])
        inputs = {name: tensor.repeat_interleave(repeats, 0) for name, tensor in self.inputs.items()}
        logits = [model(**inputs, decoder_input_ids=input_ids).logits[:, -1] for model in self.models]
        return torch.stack([scores.softmax(-1), *(each.softmax(-1) for each in logits)]).mean(0).log()


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("more", [{}, {"decoder_input_ids": torch.tensor([[1, 5], [1, 6], [1, 9]])}])
def test_an_ensemble_searches_with_the_mean_probability(num_beams, more):
    model, *others = (noisy_model(seed) for seed in (1, 2, 3))
    inputs, options = batch_of([6, 3, 4]), {"num_beams": num_beams, "max_new_tokens": 7, **more}
    found = model.generate(**inputs, **options, ensemble=others)
    with torch.no_grad():
        processors = LogitsProcessorList([MeanOfModels(others, inputs)])
        expected = model.generate(**inputs, **options, logits_processor=processors)
    assert found.tolist() == expected.tolist()
    assert found.tolist() != model.generate(**inputs, **options).tolist()


@torch.no_grad()
def test_an_ensemble_of_one_model_and_itself_changes_nothing():
    options = {**batch_of([6, 3]), "num_beams": 4, "max_new_tokens": 7, "return_dict_in_generate": True}
    alone, twice = noisy_model(4).generate(**options), noisy_model(4).generate(**options, ensemble=[noisy_model(4)])
    assert twice.sequences.tolist() == alone.sequences.tolist()
    torch.testing.assert_close(twice.sequences_scores, alone.sequences_scores)


def test_what_an_ensemble_cannot_do_is_refused():
    model, inputs = noisy_model(), batch_of([4, 3])
    for options in ({"do_sample": True}, {"num_beams": 2, "use_cache": False}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="An ensemble decodes by greedy or beam search"):
            model.generate(**inputs, max_new_tokens=3, ensemble=[noisy_model(1)], **options)
    with pytest.raises(ValueError, match="vocab_size 50, this one 40"):
        model.generate(**inputs, ensemble=[_model_with_vocabulary(50)])
    with pytest.raises(TypeError, match="expected Vaswani models, got Linear"):
        model.generate(**inputs, ensemble=[torch.nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="every model reads input_ids"):
        states = model.get_encoder()(**inputs)
        model.generate(encoder_outputs=states, max_new_tokens=3, ensemble=[noisy_model(1)])


def _model_with_vocabulary(size):

    return tiny_model(vocab_size=size)


class CountRows(LogitsProcessor):
    def __init__(self):
        self.rows = set()

    def __call__(self, input_ids, scores):
        self.rows.add(len(input_ids))
        return scores


def test_a_custom_processor_sees_the_whole_batch_at_every_step():
    """It may tell rows apart by their place, so no row may leave."""
    counter = CountRows()
    noisy_model().generate(
        **batch_of([9, 2, 4]), num_beams=2, max_extra_tokens=3, logits_processor=LogitsProcessorList([counter])
    )
    assert counter.rows == {6}


class BiasOfSentences(SentenceProcessor):
    """Adds other numbers for each sentence, and keeps which sentences there were."""

    def __init__(self, sentences: int, vocabulary: int):
        super().__init__(sentences)
        self.biases, self.seen = 2 * torch.randn(sentences, vocabulary), []

    def process(self, input_ids, scores, sentences):
        self.seen.append(sentences.tolist())
        return scores + self.biases[sentences].repeat_interleave(len(input_ids) // len(sentences), 0)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_processor_of_sentences_is_told_which_remain(num_beams, seed):
    inputs = batch_of([9, 2, 4, 1, 6])
    torch.manual_seed(seed)
    bias = BiasOfSentences(5, 40)
    options = {
        **inputs,
        "num_beams": num_beams,
        "max_extra_tokens": 4,
        "logits_processor": LogitsProcessorList([bias]),
    }
    expected = noisy_model(seed).generate(**options, fast_decoding=False)
    assert all(sentences == [0, 1, 2, 3, 4] for sentences in bias.seen)
    bias.seen.clear()
    found = noisy_model(seed).generate(**options)
    assert found.tolist() == expected.tolist()
    assert any(sentences != list(range(len(sentences))) for sentences in bias.seen)  # one before others has left


def a_hook(model):
    model.model.decoder.layers[0].register_forward_hook(lambda *_: None)
    return {}


def a_patched_forward(model):
    model.lm_head.forward = lambda hidden: torch.nn.functional.linear(hidden, model.lm_head.weight)
    return {}


def another_module(model):
    class Doubled(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model.model.decoder.layers[1].feed_forward.fc1 = Doubled(16, 24)
    return {}


def a_subclass(model):
    class Shifted(type(model)):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits[..., 7] += 100
            return outputs

    model.__class__ = Shifted
    return {}


def other_inputs(model):
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)
    return {}


def other_attention(model):
    model.model.decoder.layers[0].self_attn.q_proj = torch.nn.Sequential(
        model.model.decoder.layers[0].self_attn.q_proj
    )
    return {}


def training_mode(model):
    model.train()
    return {}


@pytest.mark.parametrize(
    "change",
    [
        a_hook,
        a_patched_forward,
        a_subclass,
        other_inputs,
        other_attention,
        lambda model: model.register_forward_hook(lambda *_: None) and {},
        lambda model: model.model.register_forward_hook(lambda *_: None) and {},
        lambda model: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(3)])},
        lambda model: {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(9)])},
        lambda model: {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())},
        lambda model: {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])},
        another_module,
        training_mode,
        lambda model: {"do_sample": True},
        lambda model: {"output_attentions": True, "return_dict_in_generate": True},
        lambda model: {"cache_implementation": "static"},
        lambda model: {"use_cache": False},
        lambda model: {
            "decoder_input_ids": torch.tensor([[1, 5], [1, 6]]),
            "decoder_attention_mask": torch.tensor([[1, 1], [1, 1]]),
        },
        lambda model: {"prefix_allowed_tokens_fn": lambda batch, tokens: [3, 4, EOS]},
    ],
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_what_the_fast_loops_do_not_know_goes_the_librarys_way(change, num_beams, monkeypatch):
    def refuse(*_):
        raise AssertionError("the fast loop was taken")

    monkeypatch.setattr(generation, "StepDecoder", refuse)
    model = noisy_model()
    options = change(model)
    outputs = model.generate(**{**batch_of([4, 3]), "num_beams": num_beams, "max_new_tokens": 4, **options})
    assert len(outputs if torch.is_tensor(outputs) else outputs.sequences) == 2
