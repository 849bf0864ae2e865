"""Features of transformers around a model: every mode of `generate()`, compiling and exporting,
loading in parts and in other precisions, tensor parallelism."""

import functools
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import infer_auto_device_map
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForSeq2SeqLM,
    CompileConfig,
    LogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.distributed import DistributedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vaswani import VaswaniForConditionalGeneration
from support.models import batch_of, tiny_config, tiny_model


PAD, BOS, EOS = 0, 1, 2
SOURCE = torch.tensor([[5, 9, 31, 7, 2, 0, 0], [8, 3, 3, 17, 22, 36, 2], [12, 2, 0, 0, 0, 0, 0]])
LEARNED = torch.tensor(
    [[14, 6, 31, 7, 28, 2, 0, 0, 0], [9, 9, 21, 4, 9, 21, 12, 36, 2], [30, 11, 2, 0, 0, 0, 0, 0, 0]]
)
TARGET = torch.tensor([[1, 14, 6, 28, 33], [1, 9, 9, 21, 4], [1, 30, 11, 2, 0]])
INPUTS = {"input_ids": SOURCE, "attention_mask": (SOURCE != PAD).long()}
STEPS = 10
PLANS_OF_5_21 = Version(transformers.__version__) >= Version("5.21")


@functools.cache
def lessons(steps: int, **overrides) -> dict[str, torch.Tensor]:
    model = tiny_model(**overrides).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    labels = LEARNED.masked_fill(LEARNED == PAD, -100)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**INPUTS, labels=labels).loss.backward()
        optimizer.step()
    return model.state_dict()


def taught_model(steps: int = 60, **overrides) -> VaswaniForConditionalGeneration:
    """A model that translates `SOURCE` into `LEARNED`, and knows it better the more steps it is taught."""
    model = tiny_model(**overrides)
    model.load_state_dict(lessons(steps, **overrides))
    return model


@torch.no_grad()
def log_probabilities(model, target: torch.Tensor, row: int = 0) -> torch.Tensor:
    """Log probabilities of all tokens after `target` `(outputs, length)`, by a plain forward without padding."""
    source = SOURCE[row, SOURCE[row] != PAD].expand(len(target), -1)
    return model(input_ids=source, decoder_input_ids=target).logits.log_softmax(-1)


def searched_by_hand(model, row: int, prefix: tuple = (BOS,), steps: int = STEPS, forbidden=lambda tokens: []) -> list:
    """Greedy search with nothing but plain forwards."""
    tokens = list(prefix)
    while len(tokens) < len(prefix) + steps and tokens[-1] != EOS:
        scores = log_probabilities(model, torch.tensor([tokens]), row)[0, -1]
        scores[forbidden(tokens)] = -torch.inf
        tokens.append(scores.argmax().item())
    return tokens


def searched_batch(model, **options) -> torch.Tensor:
    """`searched_by_hand` of all three sentences, padded as `generate()` pads."""
    rows = [torch.tensor(searched_by_hand(model, row, **options)) for row in range(len(SOURCE))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def log_probability_of(model, output: torch.Tensor, row: int = 0, start: int = 1) -> float:
    """Log probability of one output's tokens, summed, from `start` to its end token, by forced decoding."""
    tokens = output.tolist()
    end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    probabilities = log_probabilities(model, output[None], row)[0]
    return sum(probabilities[place - 1, tokens[place]].item() for place in range(start, end))


@pytest.fixture
def taught() -> VaswaniForConditionalGeneration:
    return taught_model()


# Generation: searches and samples


CACHES = [
    {},
    {"cache_implementation": "dynamic"},
    {"cache_implementation": "static"},
    {"use_cache": False},
]


def test_greedy_search_says_what_was_learned(taught):
    outputs = taught.generate(**INPUTS, max_new_tokens=STEPS)
    assert outputs[:, 0].tolist() == [BOS] * 3
    assert torch.equal(outputs[:, 1:], LEARNED)
    assert torch.equal(outputs, searched_batch(taught))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beam"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("steps", [5, 60])
def test_outputs_are_the_same_with_every_cache(steps, cache, options):
    model = taught_model(steps)
    options = {**options, "max_new_tokens": STEPS, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**INPUTS, use_cache=False, **options)
    outputs = model.generate(**INPUTS, **options, **cache)
    assert torch.equal(outputs.sequences, expected.sequences)
    for ours, theirs in zip(outputs.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_implementation", ["offloaded", "offloaded_static"])
def test_outputs_are_the_same_with_an_offloaded_cache(cache_implementation, taught):
    """Its streams are CUDA's: on a CPU the library fails with any model."""
    model, inputs = taught.to("cuda"), {name: value.to("cuda") for name, value in INPUTS.items()}
    outputs = model.generate(**inputs, max_new_tokens=STEPS, cache_implementation=cache_implementation)
    assert torch.equal(outputs[:, 1:].cpu(), LEARNED)


def test_a_quantised_cache_is_refused_as_for_every_encoder_decoder(taught):
    with pytest.raises(ValueError, match="does not support the quantized cache"):
        taught.generate(**INPUTS, max_new_tokens=3, cache_implementation="quantized")


def test_samples_have_the_models_probabilities(taught):
    outputs = taught.generate(SOURCE[1:2], do_sample=True, top_k=0, num_return_sequences=6000, max_new_tokens=1)
    shares = outputs[:, 1].bincount(minlength=40) / 6000
    expected = log_probabilities(taught, torch.tensor([[BOS]]), row=1)[0, -1].exp()
    torch.testing.assert_close(shares, expected, atol=0.025, rtol=0)


def test_samples_depend_on_the_seed_alone(taught):
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": STEPS}
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(taught.generate(**INPUTS, **options))
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].shape != outputs[2].shape or not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("warper", "kept"),
    [
        ({"top_k": 3}, lambda p: p.argsort(descending=True)[:3]),
        (
            {"top_k": 0, "top_p": 0.5},
            lambda p: p.argsort(descending=True)[: (p.sort(descending=True)[0].cumsum(0) < 0.5).sum() + 1],
        ),
        ({"top_k": 0, "min_p": 0.3}, lambda p: (p >= 0.3 * p.max()).nonzero()[:, 0]),
        ({"top_k": 0, "temperature": 0.01}, lambda p: p.argsort(descending=True)[:1]),
    ],
    ids=["top_k", "top_p", "min_p", "temperature"],
)
def test_samples_stay_among_the_tokens_that_a_warper_keeps(taught, warper, kept):
    outputs = taught.generate(SOURCE[1:2], do_sample=True, num_return_sequences=300, max_new_tokens=1, **warper)
    probabilities = log_probabilities(taught, torch.tensor([[BOS]]), row=1)[0, -1].exp()
    assert set(outputs[:, 1].tolist()) == set(kept(probabilities).tolist())


@pytest.mark.parametrize("do_sample", [False, True])
def test_beams_are_scored_with_their_forced_log_probabilities(taught, do_sample):
    outputs = taught.generate(
        **INPUTS,
        num_beams=4,
        num_return_sequences=4,
        do_sample=do_sample,
        top_k=0,
        length_penalty=0.0,
        max_new_tokens=STEPS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = outputs.sequences_scores.view(3, 4)
    expected = [log_probability_of(taught, output, row=i // 4) for i, output in enumerate(outputs.sequences)]
    torch.testing.assert_close(scores, torch.tensor(expected).view(3, 4), atol=1e-4, rtol=1e-4)
    assert torch.equal(scores, scores.sort(descending=True)[0])
    assert len({tuple(output.tolist()) for output in outputs.sequences[:4]}) == 4
    if not do_sample:
        transitions = taught.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
        torch.testing.assert_close(transitions.sum(-1).view(3, 4), scores, atol=1e-4, rtol=1e-4)


def test_transition_scores_of_greedy_search_are_forced_log_probabilities(taught):
    outputs = taught.generate(**INPUTS, max_new_tokens=STEPS, return_dict_in_generate=True, output_scores=True)
    transitions = taught.compute_transition_scores(outputs.sequences, outputs.scores, normalize_logits=True)
    for row, output in enumerate(outputs.sequences):
        length = len(searched_by_hand(taught, row)) - 1
        assert transitions[row, :length].sum().item() == pytest.approx(
            log_probability_of(taught, output, row), abs=1e-4
        )


def test_several_returned_sequences_of_a_beam_are_a_longer_list_of_the_same(taught):
    options = {"num_beams": 5, "max_new_tokens": STEPS}
    best = taught.generate(**INPUTS, **options)
    three = taught.generate(**INPUTS, **options, num_return_sequences=3).view(3, 3, -1)
    for row in range(3):
        first = three[row, 0]
        assert first[: best.shape[1]].tolist() == best[row, : len(first)].tolist()


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("steps", [10, 60])
def test_assisted_search_equals_greedy_search(row, steps):
    """The assistant is right always, sometimes or hardly ever."""
    model = taught_model(steps)
    source = SOURCE[row : row + 1, : (SOURCE[row] != PAD).sum()]
    expected = searched_by_hand(model, row)
    for assistant in (taught_model(60), taught_model(10), taught_model(1)):
        assert model.generate(source, assistant_model=assistant, max_new_tokens=STEPS)[0].tolist() == expected


@pytest.mark.parametrize("row", [0, 1, 2])
def test_search_that_looks_candidates_up_in_the_prompt_equals_greedy_search(taught, row):
    source = SOURCE[row : row + 1, : (SOURCE[row] != PAD).sum()]
    output = taught.generate(source, prompt_lookup_num_tokens=3, max_new_tokens=20)
    assert output[0].tolist() == searched_by_hand(taught, row, steps=20)


@pytest.mark.parametrize("extra", [0, 1, 2, 50])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_assisted_search_ends_at_the_limit_of_its_own_source(taught, row, extra):
    """Which is not that of the padded row."""
    inputs = {name: value[row : row + 1] for name, value in INPUTS.items()}
    limit = inputs["attention_mask"].sum().item() + extra
    expected = LEARNED[row, LEARNED[row] != PAD].tolist()[:limit]
    for assistance in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": taught_model(10)}):
        assert taught.generate(**inputs, max_extra_tokens=extra, **assistance)[0, 1:].tolist() == expected


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 2, "force_words_ids": [[5]]},
    ],
    ids=["groups of beams", "contrastive", "DoLa", "constrained"],
)
def test_modes_that_have_left_the_library_say_so(taught, options):
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        taught.generate(**INPUTS, max_new_tokens=3, **options)


def test_a_search_of_ones_own_can_be_given(taught):
    def last_token(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return torch.cat([input_ids, torch.full_like(input_ids[:, :1], 39)], dim=1)

    outputs = taught.generate(**INPUTS, custom_generate=last_token)
    assert outputs.tolist() == [[BOS, 39]] * 3


# Generation: inputs


def test_search_goes_on_from_a_given_prefix(taught):
    prefix = (BOS, 13, 27)
    outputs = taught.generate(**INPUTS, decoder_input_ids=torch.tensor([prefix] * 3), max_new_tokens=STEPS)
    assert torch.equal(outputs, searched_batch(taught, prefix=prefix))


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_given_prefix_equals_a_forced_one(taught, num_beams):
    prefix = [BOS, 13, 27]
    options = {"num_beams": num_beams, "length_penalty": 0.0}

    def allowed(batch_id, tokens):
        return [prefix[len(tokens)]] if len(tokens) < len(prefix) else list(range(40))

    given = taught.generate(**INPUTS, decoder_input_ids=torch.tensor([prefix] * 3), max_new_tokens=STEPS, **options)
    forced = taught.generate(**INPUTS, prefix_allowed_tokens_fn=allowed, max_new_tokens=STEPS + 2, **options)
    assert torch.equal(given, forced)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_generation_takes_embeddings_or_the_encoders_output_for_tokens(taught, num_beams):
    options = {"num_beams": num_beams, "max_new_tokens": STEPS, "attention_mask": INPUTS["attention_mask"]}
    expected = taught.generate(SOURCE, **options)
    embeddings = taught.get_input_embeddings()(SOURCE)
    assert torch.equal(taught.generate(inputs_embeds=embeddings, **options), expected)
    hidden = taught.get_encoder()(SOURCE, attention_mask=INPUTS["attention_mask"]).last_hidden_state
    encoded = BaseModelOutput(last_hidden_state=hidden)
    assert torch.equal(taught.generate(encoder_outputs=encoded, **options), expected)


# Generation: what changes its course


def second_halves_of_bigrams(tokens: list, bigrams: list) -> list:
    """Tokens that would repeat a bigram after the last of `tokens`."""
    return [second for first, second in pairwise(bigrams) if first == tokens[-1]]


@pytest.mark.parametrize(
    ("option", "forbidden"),
    [
        ({"bad_words_ids": [[6], [21], [12]]}, lambda tokens: [6, 21, 12]),
        ({"suppress_tokens": [6, 21, EOS]}, lambda tokens: [6, 21, EOS]),
        ({"begin_suppress_tokens": [14, 9, 30]}, lambda tokens: [14, 9, 30] if len(tokens) == 1 else []),
        ({"min_new_tokens": 8}, lambda tokens: [EOS] if len(tokens) < 1 + 8 else []),
        ({"min_length": 8}, lambda tokens: [EOS] if len(tokens) < 8 else []),
        ({"no_repeat_ngram_size": 2}, lambda tokens: second_halves_of_bigrams(tokens, tokens)),
        ({"forced_bos_token_id": 17}, lambda tokens: [i for i in range(40) if i != 17] if len(tokens) == 1 else []),
        (
            {"forced_eos_token_id": EOS, "max_length": 5},
            lambda tokens: [i for i in range(40) if i != EOS] if len(tokens) == 4 else [],
        ),
        ({"sequence_bias": [[[6], -1e9], [[21], -1e9]]}, lambda tokens: [6, 21]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_forbids_what_it_should(taught, option, forbidden):
    option = {"max_length": 1 + STEPS, **option}
    expected = searched_batch(taught, forbidden=forbidden, steps=option["max_length"] - 1)
    outputs = taught.generate(**INPUTS, **option)
    assert torch.equal(outputs, expected)
    assert outputs.shape[1] != 10 or not torch.equal(outputs[:, 1:], LEARNED)


def test_no_bigram_of_the_source_is_repeated(taught):
    row = SOURCE[0, :5]
    output = taught.generate(row[None], max_new_tokens=STEPS, encoder_no_repeat_ngram_size=2)[0].tolist()
    assert output == searched_by_hand(
        taught, 0, forbidden=lambda tokens: second_halves_of_bigrams(tokens, row.tolist())
    )
    assert output[1:4] == [14, 6, 31]
    assert output[4] != 7  # which follows 31 in the source, and in what was learned


class OnlyEvenTokens(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_logits_processor_of_ones_own_is_heard(taught, num_beams):
    outputs = taught.generate(**INPUTS, max_new_tokens=STEPS, num_beams=num_beams, logits_processor=[OnlyEvenTokens()])
    assert not (outputs[:, 1:] % 2).any()
    if num_beams == 1:
        assert torch.equal(outputs, searched_batch(taught, forbidden=lambda tokens: list(range(1, 40, 2))))


class EndsAfter(StoppingCriteria):
    """After so many tokens for each sentence, the start token not counted."""

    def __init__(self, limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - 1 >= self.limits


def test_a_stopping_criterion_of_ones_own_is_heard(taught):
    outputs = taught.generate(
        **INPUTS, max_new_tokens=STEPS, suppress_tokens=[PAD, EOS], stopping_criteria=[EndsAfter([2, 7, 4])]
    )
    assert (outputs[:, 1:] != PAD).sum(-1).tolist() == [2, 7, 4]


def test_generation_stops_behind_a_string(taught, tokenizer):
    model = taught_model(vocab_size=len(tokenizer))
    source = tokenizer("a dog sleeps", return_tensors="pt")
    free = model.generate(**source, max_new_tokens=12, suppress_tokens=[EOS])
    wanted = tokenizer.decode(free[0, 4:6])
    stopped = model.generate(
        **source, max_new_tokens=12, suppress_tokens=[EOS], stop_strings=[wanted], tokenizer=tokenizer
    )
    assert len(stopped[0]) < len(free[0])
    assert stopped[0].tolist() == free[0, : len(stopped[0])].tolist()
    assert wanted in tokenizer.decode(stopped[0])
    assert wanted not in tokenizer.decode(stopped[0, :-1])


@pytest.mark.parametrize("option", [{}, {"prompt_lookup_num_tokens": 2}], ids=["greedy", "assisted"])
def test_streamers_get_the_text_while_it_is_made(tokenizer, option, capsys):
    model = taught_model(vocab_size=len(tokenizer))
    source = tokenizer("a dog sleeps", return_tensors="pt")["input_ids"]
    output = model.generate(source, max_new_tokens=12)[0]
    text = tokenizer.decode(output, skip_special_tokens=True)
    pieces = TextIteratorStreamer(tokenizer, skip_special_tokens=True, timeout=60)
    model.generate(source, max_new_tokens=12, streamer=pieces, **option)
    assert "".join(pieces) == text
    model.generate(source, max_new_tokens=12, streamer=TextStreamer(tokenizer, skip_special_tokens=True), **option)
    assert capsys.readouterr().out == text + "\n"


def test_attentions_and_hidden_states_of_generation_are_those_of_one_forward(taught):
    taught.set_attn_implementation("eager")
    flags = {"output_attentions": True, "output_hidden_states": True}
    outputs = taught.generate(
        **INPUTS,
        max_new_tokens=6,
        suppress_tokens=[PAD, EOS],
        return_dict_in_generate=True,
        output_logits=True,
        **flags,
    )
    whole = taught(**INPUTS, decoder_input_ids=outputs.sequences[:, :-1], **flags)
    assert len(outputs.decoder_attentions) == 6
    for step in range(6):
        for layer in range(2):
            close(
                outputs.decoder_attentions[step][layer][:, :, -1],
                whole.decoder_attentions[layer][:, :, step, : step + 1],
            )
            close(outputs.cross_attentions[step][layer][:, :, -1], whole.cross_attentions[layer][:, :, step])
            close(outputs.decoder_hidden_states[step][layer][:, -1], whole.decoder_hidden_states[layer][:, step])
        close(outputs.logits[step], whole.logits[:, step])
    for ours, theirs in zip(outputs.encoder_attentions, whole.encoder_attentions, strict=True):
        close(ours, theirs)
    for ours, theirs in zip(outputs.encoder_hidden_states, whole.encoder_hidden_states, strict=True):
        close(ours, theirs)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# Compiled and exported


def counting_compiler():
    """A compiler that runs graphs as they are, and the list of the graphs that it was given."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def forward_inputs(batch: int, source: int, target: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, source, dtype=torch.long)
    mask[0, source // 2 :] = 0
    return {
        "input_ids": torch.randint(3, 40, (batch, source)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, 40, (batch, target)),
    }


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_compiled_forward_is_one_graph_for_all_shapes(taught, implementation, fresh_compiler):
    taught.set_attn_implementation(implementation)
    backend, graphs = counting_compiler()
    compiled = torch.compile(taught, backend=backend, fullgraph=True)
    shapes = [(3, 7, 5), (2, 6, 9), (4, 12, 8), (5, 9, 30), (3, 30, 4)]
    for number, shape in enumerate(shapes):
        inputs = forward_inputs(*shape)
        close(compiled(**inputs, use_cache=False).logits, taught(**inputs).logits)
        # The first shape, then any shape.
        assert len(graphs) == min(number + 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("skip_logits", [False, True])
def test_a_compiled_training_step_computes_the_same_gradients(taught, skip_logits, fresh_compiler):
    labels = LEARNED.masked_fill(LEARNED == PAD, -100)
    taught.train()
    expected = taught(**INPUTS, labels=labels).loss
    gradients = torch.autograd.grad(expected, list(taught.parameters()))
    # The loss without logits is a loop over slices of the labels that count, which is no part of a graph.
    compiled = torch.compile(taught, backend="aot_eager", fullgraph=not skip_logits)
    loss = compiled(**INPUTS, labels=labels, skip_logits=skip_logits).loss
    close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, list(taught.parameters())), gradients, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("position_embedding", ["sinusoidal", pytest.param("learned", marks=pytest.mark.slow)])
def test_generation_with_a_static_cache_compiles_one_graph_for_all_steps_and_calls(position_embedding, fresh_compiler):
    model = taught_model(position_embedding=position_embedding)
    backend, graphs = counting_compiler()
    compiling = CompileConfig(backend=backend, fullgraph=True, mode="default")
    compiling._compile_all_devices = True
    options = {"max_new_tokens": STEPS, "cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(model.generate(**INPUTS, **options)[:, 1:], LEARNED)
    assert len(graphs) == 1
    reversed_inputs = {name: value.flip(0) for name, value in INPUTS.items()}
    assert torch.equal(model.generate(**reversed_inputs, **options)[:, 1:], LEARNED.flip(0))
    assert len(graphs) == 1


@pytest.mark.slow
@torch.no_grad()
def test_inductor_computes_the_same(taught, fresh_compiler):
    """The default compiler of PyTorch, in its place; the tests above only count its graphs."""
    compiled = torch.compile(taught, fullgraph=True, dynamic=True)
    for shape in ((3, 7, 5), (2, 6, 9)):
        inputs = forward_inputs(*shape)
        close(compiled(**inputs, use_cache=False).logits, taught(**inputs).logits)
    compiling = CompileConfig(fullgraph=True, mode="default")
    compiling._compile_all_devices = True
    outputs = taught.generate(**INPUTS, max_new_tokens=STEPS, cache_implementation="static", compile_config=compiling)
    assert torch.equal(outputs[:, 1:], LEARNED)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_model_computes_the_same_for_other_shapes(taught, strict):
    batch, source, target = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "source", "target"))
    program = torch.export.export(
        taught,
        (),
        {**forward_inputs(3, 7, 5), "use_cache": False},
        dynamic_shapes={
            "input_ids": {0: batch, 1: source},
            "attention_mask": {0: batch, 1: source},
            "decoder_input_ids": {0: batch, 1: target},
            "use_cache": None,
        },
        strict=strict,
    )
    for shape in ((3, 7, 5), (2, 11, 9)):
        inputs = forward_inputs(*shape)
        close(program.module()(**inputs, use_cache=False).logits, taught(**inputs).logits)


# Loading: kinds of numbers, parts of files, devices


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(**INPUTS, decoder_input_ids=TARGET).logits.float()


@pytest.mark.parametrize("position_embedding", ["sinusoidal", "learned"])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("float16", 0.02), ("bfloat16", 0.15)])
def test_a_model_loads_in_any_precision(dtype, error, position_embedding, tmp_path):
    model = taught_model(position_embedding=position_embedding)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert {weight.dtype for weight in loaded.parameters()} == {getattr(torch, dtype)}
    torch.testing.assert_close(logits_of(loaded), logits_of(model), atol=error * 4, rtol=error)
    assert torch.equal(loaded.generate(**INPUTS, max_new_tokens=STEPS)[:, 1:], LEARNED)


def test_a_checkpoint_in_half_precision_loads_as_it_is(taught, tmp_path):
    taught.to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_shards_load_as_one_file_does(taught, tmp_path):
    taught.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)), logits_of(taught))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=str)
def test_a_device_map_changes_nothing(taught, device_map, tmp_path):
    taught.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, device_map=device_map, max_memory={"cpu": "1GB"})
    close(logits_of(loaded), logits_of(taught))
    assert torch.equal(loaded.generate(**INPUTS, max_new_tokens=STEPS)[:, 1:], LEARNED)


EVERYTHING = ["model.shared", "lm_head"] + [
    f"model.{stack}.{part}"
    for stack in ("encoder", "decoder")
    for part in ("embed_tokens", "embed_positions", "layers.0", "layers.1")
]


@pytest.mark.parametrize("on_disk", [["model.decoder.layers.1"], EVERYTHING], ids=["a layer", "everything"])
def test_parts_may_stay_on_disk(taught, on_disk, tmp_path):
    taught.save_pretrained(tmp_path / "model")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model",
        device_map={part: "disk" if part in on_disk else "cpu" for part in EVERYTHING},
        offload_folder=tmp_path / "offloaded",
    )
    for part in on_disk:
        assert all(weight.device.type == "meta" for weight in loaded.get_submodule(part).parameters())
    close(logits_of(loaded), logits_of(taught))
    assert torch.equal(loaded.generate(**INPUTS, max_new_tokens=STEPS)[:, 1:], LEARNED)
    labels = LEARNED.masked_fill(LEARNED == PAD, -100)
    with torch.no_grad():
        close(loaded(**INPUTS, labels=labels, skip_logits=True).loss, taught(**INPUTS, labels=labels).loss)


def test_a_device_map_splits_no_layer(taught):
    layer = 4 * sum(weight.numel() for weight in taught.model.decoder.layers[0].parameters())  # bytes
    for tenths in range(15, 35, 5):
        room = {"cpu": layer * tenths // 10, "disk": 10**9}
        device_map = infer_auto_device_map(taught, room, taught._no_split_modules)
        assert set(device_map.values()) == {"cpu", "disk"}
        assert not [name for name in device_map if ".layers." in name and not name.split(".layers.")[1].isdigit()]


def edited(model, path: Path, edit) -> Path:
    model.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


FC1 = "model.decoder.layers.0.feed_forward.fc1.weight"


def test_a_missing_weight_is_reported_and_drawn_anew(taught, tmp_path, caplog):
    path = edited(taught, tmp_path, lambda weights: weights.pop(FC1))
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(path, output_loading_info=True)
    assert report["missing_keys"] == {FC1}
    assert not report["unexpected_keys"]
    weight = loaded.get_parameter(FC1)
    assert torch.isfinite(weight).all()
    assert 0 < weight.abs().max() <= (6 / (16 + 24)) ** 0.5  # Glorot uniform
    assert not torch.equal(weight, taught.get_parameter(FC1))
    told = caplog.text
    assert "fc1.weight" in told
    assert "MISSING" in told


def test_an_unexpected_weight_is_reported_and_ignored(taught, tmp_path, caplog):
    path = edited(taught, tmp_path, lambda weights: weights.update({"model.decoder.adapter.weight": torch.ones(2)}))
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(path, output_loading_info=True)
    assert report["unexpected_keys"] == {"model.decoder.adapter.weight"}
    assert not report["missing_keys"]
    assert torch.equal(logits_of(loaded), logits_of(taught))
    told = caplog.text
    assert "model.decoder.adapter.weight" in told
    assert "UNEXPECTED" in told


def test_a_weight_of_another_shape_is_refused_unless_it_may_be_ignored(taught, tmp_path, caplog):
    path = edited(taught, tmp_path, lambda weights: weights.update({FC1: torch.ones(5, 16)}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSeq2SeqLM.from_pretrained(path)
    told = caplog.text
    assert "fc1.weight" in told
    assert "[5, 16]" in told.replace("(", "[").replace(")", "]")
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(
        path, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert [key[0] for key in report["mismatched_keys"]] == [FC1]
    assert loaded.get_parameter(FC1).shape == (24, 16)


def test_a_vocabulary_can_grow_to_a_multiple(taught, tmp_path):
    expected = logits_of(taught)
    taught.resize_token_embeddings(43, pad_to_multiple_of=16, mean_resizing=False)
    assert taught.config.vocab_size == 48
    assert taught.lm_head.weight is taught.model.shared.weight is taught.model.encoder.embed_tokens.weight
    close(logits_of(taught)[..., :40], expected)
    taught.save_pretrained(tmp_path)
    close(logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path))[..., :40], expected)


@pytest.mark.parametrize("flash", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention_is_refused_where_keys_and_values_differ_in_width(model, flash, tmp_path):
    message = f"{flash!r} needs keys and values of one width, but d_k is 4 and d_v is 6"
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(flash)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=message):
        VaswaniForConditionalGeneration._from_config(tiny_config(), attn_implementation=flash)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation=flash)


def test_flash_attention_is_not_refused_for_its_widths_where_they_are_one():
    """Without a GPU, transformers' own check is what ends it."""
    with pytest.raises((ImportError, ValueError)) as failure:
        tiny_model(d_k=8, d_v=8).set_attn_implementation("flash_attention_2")
    assert "of one width" not in str(failure.value)


def test_with_flash_attention_padded_sources_are_read_as_without(monkeypatch):
    """The library's flash attention takes one mask for queries and keys; here a stand-in that computes as it does."""
    lengths = []

    def flash(module, query, key, value, attention_mask, scaling, **kwargs):
        assert query.shape[2] == key.shape[2]  # all that one mask of two dimensions can be for
        assert attention_mask is None or attention_mask.shape == (len(query), key.shape[2])
        lengths.append(key.shape[2])
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None].bool()
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        allowed = allowed.tril() if module.is_causal else allowed
        allowed = allowed if attention_mask is None else allowed & attention_mask
        outputs = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scaling)
        return outputs.transpose(1, 2), None

    model = tiny_model(d_k=8, d_v=8)
    inputs = {**batch_of([7, 4]), "decoder_input_ids": torch.randint(3, 40, (2, 5))}
    expected = model(**inputs).logits
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"
    close(model(**inputs).logits, expected)
    layers = model.config.encoder_layers, model.config.decoder_layers
    assert (lengths.count(7), lengths.count(5)) == layers  # cross-attention went another way
    unpadded = {"input_ids": inputs["input_ids"][:1, :5], "decoder_input_ids": inputs["decoder_input_ids"][:1]}
    model(**unpadded)
    assert lengths[sum(layers) :] == [5] * (layers[0] + 2 * layers[1])


# Tensor parallelism


def test_every_rule_of_the_tensor_parallel_plan_names_something(model):
    modules = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in model.named_modules()}
    matrices = ("_proj", "fc1", "fc2", "embed_tokens", "shared", "lm_head")
    # Before 5.21, transformers adds a rule of its own to the plan of every model with tied embeddings.
    of_the_library = set() if PLANS_OF_5_21 else {"model.embed_tokens"}
    assert set(model.tp_plan) == {name for name in modules if name.endswith(matrices)} | of_the_library


def gradients_of(model, **options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss in training mode, with label smoothing, and what its backward pass leaves in every weight."""
    model.train()
    model.zero_grad()
    loss = model(**INPUTS, labels=LEARNED.masked_fill(LEARNED == PAD, -100), **options).loss
    loss.backward()
    model.eval()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return loss.detach(), {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients.items()
    }


def half_a_model_each(rank: int, folder: str) -> None:
    """One of two processes: compares the models of `folder`, split over the two, with the same models in one piece."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for path in sorted(Path(folder).glob("model-*")):
        whole = AutoModelForSeq2SeqLM.from_pretrained(path)
        split = AutoModelForSeq2SeqLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2))
        assert split.get_parameter(FC1).to_local().shape == (12, 16)
        assert split.lm_head.weight.to_local().shape[0] in (20, 21)
        close(logits_of(split), logits_of(whole))
        close(split(**INPUTS, decoder_input_ids=TARGET).logits, whole(**INPUTS, decoder_input_ids=TARGET).logits)
        for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
            outputs = split.generate(**INPUTS, max_new_tokens=STEPS, **options)
            assert torch.equal(outputs, whole.generate(**INPUTS, max_new_tokens=STEPS, **options))
        assert torch.equal(split.generate(**INPUTS, max_new_tokens=STEPS)[:, 1:], LEARNED)
        for skip_logits in (False, True):
            loss, gradients = gradients_of(split, skip_logits=skip_logits)
            expected_loss, expected = gradients_of(whole, skip_logits=skip_logits)
            close(loss, expected_loss)
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                close(gradient, expected[name])
        split.save_pretrained(Path(folder) / "saved" / path.name)
        saved = AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "saved" / path.name)
        assert torch.equal(logits_of(saved), logits_of(whole))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is not None or torch.accelerator.is_available(),
    reason="transformers puts the halves on the accelerators that PyTorch was built for",
)
def test_two_processes_with_half_a_model_each_compute_what_one_does(tmp_path):
    odd = 41 if PLANS_OF_5_21 else 42  # transformers before 5.21 refuses what does not divide evenly
    variants = {
        "tied": {},
        "odd": {"vocab_size": odd, "position_embedding": "learned", "output_bias": True, "source_vocab_size": 44},
        "odd-untied": {"vocab_size": odd, "tie_word_embeddings": False, "attention_bias": True, "output_bias": True},
    }
    for name, fields in variants.items():
        taught_model(**fields).save_pretrained(tmp_path / f"model-{name}")
    torch.multiprocessing.spawn(half_a_model_each, (str(tmp_path),), nprocs=2)
    assert len(list((tmp_path / "saved").iterdir())) == len(variants)
