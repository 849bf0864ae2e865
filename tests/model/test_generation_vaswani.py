import itertools
import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_vaswani.decoding_vaswani import gnmt_length_penalty
from support.models import BOS, EOS, PAD, SPECIAL, batch_of, noisy_model, tiny_model


PAPER = {"num_beams": 4, "length_penalty_form": "gnmt", "length_penalty": 0.6}


def test_gnmt_penalty_by_hand():
    assert gnmt_length_penalty(1, 0.6) == 1.0
    assert gnmt_length_penalty(7, 1.0) == 2.0
    assert gnmt_length_penalty(19, 0.5) == 2.0
    assert gnmt_length_penalty(19, -0.5) == 0.5


def hypotheses(model, source: torch.Tensor, limit: int, alpha: float) -> list[tuple[float, list[int]]]:
    """Score and tokens of every possible output, best first: those that end, and those that the limit cuts off."""
    vocabulary = range(model.config.vocab_size)
    others = [token for token in vocabulary if token != EOS]
    outputs = [(*body, EOS) for n in range(limit) for body in itertools.product(others, repeat=n)]
    outputs += itertools.product(others, repeat=limit)
    scored = []
    for length, group in itertools.groupby(outputs, key=len):
        tokens = torch.tensor(list(group))
        starts = torch.full((len(tokens), 1), BOS)
        logits = model(
            input_ids=source.expand(len(tokens), -1), decoder_input_ids=torch.cat([starts, tokens[:, :-1]], dim=1)
        ).logits
        totals = logits.log_softmax(-1).gather(-1, tokens[..., None]).sum((1, 2))
        scores = totals / ((5 + length) / 6) ** alpha
        scored += zip(scores.tolist(), tokens.tolist())
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5, -0.5])
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_a_wide_beam_equals_exhaustive_search(seed, alpha):
    """Also for sentences with different limits in one batch, and for the best three."""
    model = noisy_model(seed, vocab_size=5)
    torch.manual_seed(seed)
    lengths = [1, 3, 2]
    inputs = batch_of(lengths, vocab_size=5)
    options = {**PAPER, "length_penalty": alpha, "num_beams": 70, "num_return_sequences": 3, "max_extra_tokens": 1}
    outputs = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    scores = outputs.sequences_scores.view(3, 3)
    for i, length in enumerate(lengths):
        expected = hypotheses(model, inputs["input_ids"][i : i + 1, :length], length + 1, alpha)[:3]
        torch.testing.assert_close(scores[i], torch.tensor([score for score, _ in expected]), rtol=1e-4, atol=1e-4)
        for row, (_, tokens) in zip(outputs.sequences.view(3, 3, -1)[i], expected):
            assert row[1 : 1 + len(tokens)].tolist() == tokens


@pytest.mark.parametrize("form", ["gnmt", "length"])
def test_scores_are_the_sums_over_their_tokens_divided_by_the_penalty(form):
    """Against the library's own account of a beam search."""
    model, inputs = noisy_model(1), batch_of([5, 3, 6])
    options = {**PAPER, "length_penalty_form": form, "max_extra_tokens": 4}
    outputs = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    transitions = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    lengths = (outputs.beam_indices >= 0).sum(-1)
    penalty = ((5 + lengths) / 6) ** 0.6 if form == "gnmt" else lengths**0.6
    torch.testing.assert_close(outputs.sequences_scores, transitions.sum(-1) / penalty, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_equals_its_sentences_one_by_one(seed, num_beams):
    model = noisy_model(seed)
    torch.manual_seed(seed)
    lengths = [4, 9, 1, 6]
    inputs = batch_of(lengths)
    options = {**PAPER, "num_beams": num_beams, "max_extra_tokens": 6}
    together = model.generate(**inputs, **options)
    for i, length in enumerate(lengths):
        alone = model.generate(inputs["input_ids"][i : i + 1, :length], **options)[0]
        assert together[i, : len(alone)].tolist() == alone.tolist()
        assert all(token in (PAD, EOS) for token in together[i, len(alone) :])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_each_output_is_limited_by_its_own_source(num_beams, do_sample):
    """The model is never allowed to end."""
    outputs = noisy_model().generate(
        **batch_of([4, 9, 6]),
        **{**PAPER, "num_beams": num_beams, "do_sample": do_sample, "max_extra_tokens": 50, "num_return_sequences": 1},
        suppress_tokens=[EOS, PAD],
    )
    written = (outputs[:, 1:] > EOS).sum(-1)  # what follows is filled with special tokens
    assert written.tolist() == [54, 59, 56]


@pytest.mark.parametrize("given", [{"max_new_tokens": 70}, {"max_length": 71}])
def test_an_explicit_length_wins(given):
    outputs = noisy_model().generate(
        **batch_of([4, 2]), **PAPER, max_extra_tokens=3, **given, suppress_tokens=[EOS, PAD]
    )
    assert tuple(outputs.shape) == (2, 71)


class FixedProbabilities(LogitsProcessor):
    """At every step the end has probability 0.6, one token 0.3 and one 0.1, whatever the model says."""

    def __call__(self, input_ids, scores):
        scores = torch.full_like(scores, -1e6)
        scores[:, [EOS, 3, 4]] = torch.tensor([0.6, 0.3, 0.1]).log()
        return scores


@pytest.mark.parametrize(
    ("alpha", "steps"),
    [
        # ln 0.6 = -0.511 after one step; the best that goes on has ln 0.3 = -1.204 and cannot rise.
        (0.0, 1),
        # The limit of 5 + 50 tokens divides by (60 / 6)² = 100: -1.204 n / 100 falls below -0.511 at n = 43.
        (2.0, 43),
        # ... by 10: -1.204 n / 10 falls below at n = 5.
        (1.0, 5),
    ],
)
def test_search_ends_exactly_when_nothing_unfinished_can_win(alpha, steps):
    model, calls = noisy_model(), []
    model.model.decoder.register_forward_hook(lambda *_: calls.append(1))
    options = {**PAPER, "length_penalty": alpha, "max_extra_tokens": 50}
    outputs = model.generate(**batch_of([5]), **options, logits_processor=LogitsProcessorList([FixedProbabilities()]))
    assert outputs[0, 1].item() == EOS
    assert len(calls) == steps


def test_the_form_survives_saving_and_loading(tmp_path):
    model, inputs = noisy_model(2), batch_of([4, 6])
    expected = model.generate(**inputs, **PAPER, max_extra_tokens=5)
    model.generation_config = GenerationConfig(**SPECIAL, **PAPER, max_extra_tokens=5)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["length_penalty_form"], saved["max_extra_tokens"]) == ("gnmt", 5)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(**inputs), expected)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["length_penalty_form"] == "gnmt"
    own_config = GenerationConfig(**SPECIAL, **PAPER, max_extra_tokens=5)
    assert torch.equal(noisy_model(2).generate(**inputs, generation_config=own_config), expected)


def test_the_form_set_on_the_models_own_configuration_survives_too(tmp_path):
    model, inputs = tiny_model(), batch_of([4, 6])
    for name, value in {**PAPER, "max_extra_tokens": 5}.items():
        setattr(model.generation_config, name, value)
    expected = model.generate(**inputs)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (loaded.generation_config.length_penalty_form, loaded.generation_config.max_extra_tokens) == ("gnmt", 5)
    assert torch.equal(loaded.generate(**inputs), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty_form": "marian"}, "length_penalty_form must be one of length, gnmt, got 'marian'"),
        ({"max_extra_tokens": -1}, "max_extra_tokens must not be negative, got -1"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        noisy_model().generate(**batch_of([3]), **options)


def test_a_callers_own_loop_gets_what_generate_prepares():
    """`custom_generate`, with the length that `max_extra_tokens` allows and the fields of the search."""

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        assert generation_config.length_penalty_form == "gnmt"
        return torch.full((len(input_ids), 1), generation_config.max_length)

    outputs = noisy_model().generate(**batch_of([4, 9]), **PAPER, max_extra_tokens=5, custom_generate=loop)
    assert outputs.tolist() == [[15]] * 8  # nine tokens, five more and the start token, for each of four beams


def test_the_models_own_loop_gives_everything_that_can_be_asked_for():
    """GNMT's penalty with outputs of every step, which the fast decoder does not have."""
    model, inputs = noisy_model(1), batch_of([5, 3])
    model.set_attn_implementation("eager")
    names = ("scores", "logits", "attentions", "hidden_states")
    asked = {f"output_{name}": True for name in names}
    outputs = model.generate(**inputs, **PAPER, max_extra_tokens=4, return_dict_in_generate=True, **asked)
    steps = len(outputs.scores)
    assert len(outputs.logits) == len(outputs.decoder_attentions) == len(outputs.decoder_hidden_states) == steps
    torch.testing.assert_close(outputs.scores[0], outputs.logits[0].log_softmax(-1))
    assert tuple(outputs.cross_attentions[0][1].shape) == (8, 2, 1, 5)
    assert len(outputs.encoder_attentions) == 2 and len(outputs.encoder_hidden_states) == 3
    assert outputs.past_key_values.get_seq_length() == steps
    assert torch.equal(outputs.sequences, model.generate(**inputs, **PAPER, max_extra_tokens=4))


def test_encoder_outputs_of_the_caller_stay_as_they_are():
    model, inputs = noisy_model(1), batch_of([5, 3])
    with torch.no_grad():
        states = model.get_encoder()(**inputs)
    options = {"encoder_outputs": states, "attention_mask": inputs["attention_mask"], "renormalize_logits": True}
    outputs = model.generate(**options, num_beams=3, max_new_tokens=4)  # neither loop's first choice: prepared twice
    assert tuple(states[0].shape) == (2, 5, 16)
    assert torch.equal(outputs, model.generate(**inputs, num_beams=3, max_new_tokens=4, renormalize_logits=True))


def test_a_synced_search_calls_the_model_until_every_process_has_finished(monkeypatch):
    """Another process is unfinished for six steps; this one has three."""
    model, calls, rounds = noisy_model(), [], []
    model.model.decoder.register_forward_hook(lambda *_: calls.append(1))

    def all_reduce(flag):
        rounds.append(flag.item())
        flag += len(rounds) <= 6

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    outputs = model.generate(**batch_of([4]), **PAPER, max_new_tokens=3, suppress_tokens=[EOS], synced_gpus=True)
    assert outputs.shape[1] == 4
    assert (len(calls), rounds) == (6, [1, 1, 1, 0, 0, 0, 0])
