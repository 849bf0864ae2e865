"""Restricted self-attention (section 4) against attention with a mask written as a double loop."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, GenerationConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from hf_vaswani import VaswaniConfig, kernels_vaswani, modeling_vaswani, window_vaswani
from hf_vaswani.decoding_vaswani import StepDecoder
from hf_vaswani.modeling_vaswani import VaswaniAttention
from hf_vaswani.window_vaswani import restricted, shortest_in_blocks
from support.models import (
    EOS,
    SPECIAL,
    batch_of,
    random_tokens,
    sources_of,
    strong_model,
    tiny_config,
    tiny_model,
)


CREATE = {"encoder": create_bidirectional_mask, "decoder": create_causal_mask}


def visible(length: int, window: int, side: str) -> torch.Tensor:
    """Positions that each position sees, `(length, length)`, by the definition."""
    rows = []
    for i in range(length):
        row = []
        for j in range(length):
            distance = i - j if side == "decoder" else abs(i - j)
            row.append(0 <= distance <= window // 2)
        rows.append(row)
    return torch.tensor(rows)


def oracle(attention: VaswaniAttention, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Self-attention by PyTorch, with `mask` `(batch, length, length)`."""
    heads = []
    for projection, width in (
        (attention.q_proj, attention.d_k),
        (attention.k_proj, attention.d_k),
        (attention.v_proj, attention.d_v),
    ):
        heads.append(projection(states).unflatten(-1, (-1, width)).transpose(1, 2))
    return attention.o_proj(F.scaled_dot_product_attention(*heads, mask[:, None]).transpose(1, 2).flatten(2))


def self_attention(config: VaswaniConfig, side: str, dtype: torch.dtype = torch.float32) -> VaswaniAttention:
    torch.manual_seed(1)
    return VaswaniAttention(config, layer_idx=0, is_causal=side == "decoder").to(dtype)


def attend(attention: VaswaniAttention, side: str, states: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Self-attention as the stacks call it."""
    config = attention.config
    create_mask = restricted(CREATE[side], config.encoder_reach if side == "encoder" else config.decoder_reach)
    return attention(states, create_mask(config, states, padding, past_key_values=None))[0]


def padding_of(side: str | None, length: int) -> torch.Tensor | None:
    return None if side is None else sources_of([length, max(1, length // 3), max(1, length - 3)], side)[1]


@pytest.fixture
def blocks(monkeypatch) -> list[int]:
    """Lengths of the sequences that are divided into blocks."""
    lengths, real = [], window_vaswani.attention_in_blocks

    def recorded(module, query, *args, **kwargs):
        lengths.append(query.shape[2])
        return real(module, query, *args, **kwargs)

    monkeypatch.setattr(modeling_vaswani, "attention_in_blocks", recorded)
    return lengths


# The definition


def test_the_papers_models_see_all_positions():
    config = VaswaniConfig()
    assert (config.attention_window, config.encoder_reach, config.decoder_reach) == (None, None, None)
    assert restricted(create_causal_mask, None) is create_causal_mask


@pytest.mark.parametrize(("side", "reaches"), [("both", (3, 3)), ("encoder", (3, None)), ("decoder", (None, 3))])
@pytest.mark.parametrize("implementation", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
@torch.no_grad()
def test_weights_outside_the_neighbourhood_are_zero(side, reaches, implementation):
    """Weights of eager attention; of flex attention, which returns none, the logits."""
    model = tiny_model(d_v=8, attention_window=6, attention_window_side=side, attn_implementation="eager")
    inputs = {"input_ids": random_tokens(2, 9), "decoder_input_ids": random_tokens(2, 11)}
    outputs = model(**inputs, output_attentions=True)
    if implementation != "eager":
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(model(**inputs).logits, outputs.logits, atol=1e-6, rtol=1e-5)
        return
    for name, reach, length in zip(("encoder", "decoder"), reaches, (9, 11)):
        expected = visible(length, 6 if reach == 3 else 1000, name).expand(2, 2, -1, -1)
        assert all(torch.equal(weights > 0, expected) for weights in getattr(outputs, f"{name}_attentions"))
    assert all((weights > 0).all() for weights in outputs.cross_attentions)


@pytest.mark.parametrize(
    ("field", "value"), [("attention_window", 0), ("attention_window", -2), ("attention_window_side", "left")]
)
def test_impossible_values_are_refused_by_name(field, value):
    with pytest.raises(StrictDataclassError, match=rf"{field} must be .*, got '?{value}"):
        tiny_config(**{field: value})
    with pytest.raises(StrictDataclassError, match="attention_window"):
        tiny_config(attention_window="wide")
    with pytest.raises(TypeError, match="attention_window"):
        tiny_config(attention_windows=3)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "paged|sdpa", "my_own"])
def test_an_attention_without_a_mask_is_refused(implementation):
    with pytest.raises(ValueError, match=rf"{implementation.replace('|', '.')}.*attention_window is 4"):
        tiny_model(d_v=4, attention_window=4, attn_implementation=implementation)
    model = tiny_model(d_v=4, attention_window=4)
    with pytest.raises(ValueError, match="attention_window is 4"):
        model.set_attn_implementation(implementation)


# The same numbers by every way


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "blocks"])
@pytest.mark.parametrize(
    ("length", "window"), [(1, 1), (2, 9), (7, 3), (13, 4), (13, 1), (33, 8), (61, 20), (20, 500)]
)
def test_outputs_and_gradients_are_those_of_the_mask(
    length, window, implementation, side, padding, blocks, monkeypatch
):
    if implementation == "blocks":
        monkeypatch.setattr(window_vaswani, "SMALLEST_BLOCK", 4)
        monkeypatch.setattr(window_vaswani, "WORTHWHILE", 0)
        monkeypatch.setattr(kernels_vaswani, "SHORT", 0)
    name = "sdpa" if implementation == "blocks" else implementation
    attention = self_attention(tiny_config(attention_window=window, attn_implementation=name), side)
    mask = padding_of(padding, length)
    states = torch.randn(3, length, 16, requires_grad=True)
    sees = visible(length, window, side).expand(3, -1, -1) & (True if mask is None else mask[:, None].bool())
    # A softmax over no position is undefined; padding may see itself.
    expected = oracle(attention, states, sees | torch.eye(length, dtype=torch.bool))
    found = attend(attention, side, states, mask)
    assert bool(blocks) == (implementation == "blocks")

    kept = torch.ones(3, length, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], atol=1e-6, rtol=0)
    weights = (states, *attention.parameters())
    factors = torch.randn(3, length, 16) / kept.sum()
    gradients = [torch.autograd.grad((out * factors)[kept].sum(), weights) for out in (found, expected)]
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("window", [5, 16, 100])
def test_long_sequences_are_divided_and_short_ones_masked(window, side, blocks):
    attention = self_attention(tiny_config(attention_window=window, attn_implementation="sdpa"), side, torch.float64)
    shortest = shortest_in_blocks(window // 2)
    for length in (shortest - 1, shortest, shortest + 1, shortest + 37):
        states = torch.randn(2, length, 16, dtype=torch.float64)
        found = attend(attention, side, states, None)
        near = visible(length, window, side).expand(2, -1, -1)
        torch.testing.assert_close(found, oracle(attention, states, near), atol=1e-12, rtol=0)
    assert blocks == [shortest, shortest + 1, shortest + 37]


def test_blocks_are_cheaper_by_count():
    """Keys that the queries of the shortest divided sequence are multiplied with, at most a quarter of all."""
    for reach in range(300):
        length = shortest_in_blocks(reach)
        keys = window_vaswani.block_size(reach) + 2 * reach
        assert 4 * keys <= length and 2 * reach + 1 <= keys


@pytest.mark.parametrize("padding", ["right", "left"])
def test_training_in_blocks_is_training_with_masks(padding, blocks, monkeypatch):
    """Losses and gradients of whole models, with the loss in slices, with and without gradient checkpointing."""
    model = strong_model(attention_window=7, d_v=4).double().train()
    source, mask = sources_of([250, 90, 5], padding)
    target, target_mask = sources_of([230, 100, 3])
    batch = {
        "input_ids": source,
        "attention_mask": mask,
        "labels": target.masked_fill(target_mask == 0, -100),
        "skip_logits": True,
    }
    results = []
    for way in ("masks", "blocks", "checkpointed blocks"):
        monkeypatch.setattr(window_vaswani, "WORTHWHILE", 1000 if way == "masks" else 4)
        if way == "checkpointed blocks":
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append((loss.detach(), [weight.grad.clone() for weight in model.parameters()]))
        assert bool(blocks) == (way != "masks")
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0], atol=1e-6, rtol=0)
        for found, expected in zip(gradients, results[0][1]):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_train_with_dropout_and_in_half_precision(dtype, blocks):
    model = tiny_model(attention_window=4, dropout=0.1, attention_dropout=0.3).to(dtype).train()
    batch = batch_of([240, 200])
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert blocks
    assert all(torch.isfinite(weight.grad).all() and weight.grad.any() for weight in model.parameters())


# Decoding


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_cached_decoding_is_uncached_decoding(side, implementation):
    model = tiny_model(attention_window=5, attn_implementation=implementation)
    source, mask = sources_of([9, 4], side)
    target, target_mask = sources_of([12, 8], "left")
    inputs = {"input_ids": source, "attention_mask": mask}
    whole = model(**inputs, decoder_input_ids=target, decoder_attention_mask=target_mask, use_cache=False).logits
    cache, steps = None, []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 9), (9, 10), (10, 12)):
        outputs = model(
            **inputs,
            decoder_input_ids=target[:, start:end],
            decoder_attention_mask=target_mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = outputs.past_key_values
        steps.append(outputs.logits)
    kept = target_mask.bool()
    torch.testing.assert_close(torch.cat(steps, dim=1)[kept], whole[kept], atol=1e-6, rtol=1e-6)
    model.config.attention_window = None
    unrestricted = model(**inputs, decoder_input_ids=target, decoder_attention_mask=target_mask).logits
    assert not torch.allclose(unrestricted[kept], whole[kept], atol=1e-3)


def generating_model(seed: int, **fields):
    model = tiny_model(**fields).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.4 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    model.generation_config = GenerationConfig(**SPECIAL)
    return model


@pytest.mark.parametrize(
    ("window", "side", "num_beams"),
    [
        (1, "both", 4),
        (2, "decoder", 1),
        (5, "both", 4),
        (9, "encoder", 1),
        (30, "both", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "both", 1), (2, "decoder", 4), (5, "both", 1), (9, "encoder", 4), (30, "both", 4))
        ),
    ],
)
def test_the_fast_loops_give_what_the_library_gives(window, side, num_beams):
    """Sentences of different lengths, some of which leave the batch early, and outputs that outgrow the cache."""
    seeds_that_differ = 0
    for seed in range(2):
        model = generating_model(seed, attention_window=window, attention_window_side=side)
        search = {"num_beams": num_beams, "max_extra_tokens": 25, "min_new_tokens": 15 * seed}
        options = {**batch_of([3, 9, 14, 1]), **search, "decoder_input_ids": torch.tensor([[1, 7, 9]] * 4)}
        expected = model.generate(**options, fast_decoding=False)
        assert model.generate(**options).tolist() == expected.tolist()
        model.config.attention_window = None
        seeds_that_differ += model.generate(**options).tolist() != expected.tolist()
    assert seeds_that_differ >= (1 if window < 30 else 0)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_fast_loops_keep_no_slot_out_of_reach(num_beams, monkeypatch):
    used, real = [], StepDecoder.compact

    def recorded(self, kept, beams):
        real(self, kept, beams)
        used.append(self.used)

    monkeypatch.setattr(StepDecoder, "compact", recorded)
    options = {**batch_of([5, 3]), "num_beams": num_beams, "max_new_tokens": 100, "suppress_tokens": [EOS]}
    generating_model(1, attention_window=8).generate(**options)
    assert len(used) > 20 and max(used) <= (8 // 2 + 1) * num_beams
    used.clear()
    generating_model(1).generate(**options)
    assert max(used) > 90


def test_a_static_cache_gives_the_same():
    model, options = generating_model(3, attention_window=3), {**batch_of([4, 7]), "max_new_tokens": 12}
    expected = model.generate(**options, fast_decoding=False)
    found = model.generate(**options, fast_decoding=False, cache_implementation="static")
    assert found.tolist() == expected.tolist()


def test_a_checkpoint_keeps_its_window(tmp_path):
    model = strong_model(attention_window=3, attention_window_side="decoder")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "window_vaswani.py").is_file()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (loaded.config.attention_window, loaded.config.attention_window_side) == (3, "decoder")
    inputs = {"input_ids": random_tokens(1, 8), "decoder_input_ids": random_tokens(1, 8)}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
        model.config.attention_window = None
        assert not torch.allclose(loaded(**inputs).logits, model(**inputs).logits)
