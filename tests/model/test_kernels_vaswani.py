import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_vaswani import kernels_vaswani, modeling_vaswani
from hf_vaswani.kernels_vaswani import (
    SHORT,
    Int8Linear,
    PackedInt8Linear,
    ShortAttention,
    SmoothedCrossEntropy,
    attention_dtype,
    best_continuations,
    dropout,
    has_fused_int8,
    linear_layers,
    projected_cross_entropy,
    rounded_up,
)
from support.models import batch_of, noisy_model, random_tokens, sources_of, tiny_config, tiny_model


# Dropout (section 5.4)


def test_dropout_drops_its_share_and_keeps_the_mean():
    ones = torch.ones(400, 1000)
    for p in (0.1, 0.3, 0.5):
        dropped = dropout(ones, p, training=True)
        assert (dropped == 0).float().mean().item() == pytest.approx(p, abs=0.003)
        assert dropped.mean().item() == pytest.approx(1.0, abs=0.005)
        kept = dropped[dropped != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)), atol=1e-4, rtol=0)
    assert dropout(ones, 0.3, training=False) is ones
    assert dropout(torch.ones(3, 5), 0.5, training=True).shape == (3, 5)  # not a multiple of four elements
    assert torch.isfinite(dropout(ones, 0.9999999, training=True)).all()


def test_dropout_neighbours_are_independent():
    dropped = dropout(torch.ones(100_000, 4), 0.5, training=True) == 0
    patterns = (dropped.long() * torch.tensor([1, 2, 4, 8])).sum(-1).bincount(minlength=16) / 100_000
    torch.testing.assert_close(patterns, torch.full((16,), 1 / 16), atol=0.004, rtol=0)


# Attention in training


@pytest.fixture
def sdpa_types(monkeypatch) -> list[set[torch.dtype]]:
    """The types that torch's own attention is called with."""
    seen, real = [], F.scaled_dot_product_attention

    def spy(query, key, value, *args, **kwargs):
        seen.append({query.dtype, key.dtype, value.dtype})
        return real(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def training_batch(source: int, target: int) -> dict[str, torch.Tensor]:
    """Two pairs, of which the second has padding on both sides."""
    inputs, mask = sources_of([source, source - 2])
    labels = random_tokens(2, target)
    labels[1, -1] = -100
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def test_gradients_through_attention_on_a_cpu_are_computed_in_32_bits(sdpa_types):
    """In bfloat16 torch takes many times as long for them."""
    model, batch = tiny_model().train(), training_batch(SHORT + 1, SHORT + 1)
    loss = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        half = model(**batch).loss
    half.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.testing.assert_close(half, loss, rtol=2e-2, atol=0)
    assert sdpa_types == [{torch.float32}] * 12  # two passes through two layers of three
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    assert sdpa_types[-1] == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_of_short_sentences_teaches_what_torchs_own_does(masked, dtype, sdpa_types, monkeypatch):
    batch = training_batch(7, 9)
    if not masked:
        batch = {"input_ids": batch["input_ids"][:1], "labels": batch["labels"][:1]}
    gradients, losses = [], []
    for short in (SHORT, 0):
        monkeypatch.setattr(kernels_vaswani, "SHORT", short)
        model = tiny_model().train()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses.append(model(**batch).loss)
        losses[-1].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        assert len(sdpa_types) == (0 if short else 6)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=0)
    assert (gradients[0] - gradients[1]).norm() < tolerance * gradients[1].norm()


def test_attention_of_short_sentences_takes_masks_to_add(sdpa_types, monkeypatch):
    module = modeling_vaswani.VaswaniAttention(tiny_config(), 0, is_causal=True)
    states, blocked = torch.randn(2, 5, 16), torch.rand(2, 1, 5, 5) < 0.3
    blocked[..., 0] = False
    added = torch.zeros(2, 1, 5, 5).masked_fill(blocked, -torch.inf)
    module.config._attn_implementation = "sdpa"
    booleans, floats = module(states, ~blocked)[0], module(states, added)[0]
    assert not sdpa_types
    monkeypatch.setattr(kernels_vaswani, "SHORT", 0)
    expected = module(states, ~blocked)[0]
    torch.testing.assert_close(booleans, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(floats, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [5, 16, 20])
def test_attention_of_short_sentences_has_the_gradients_of_its_formula(keys):
    query, key, value = (torch.randn(2, 3, n, 4, dtype=torch.double, requires_grad=True) for n in (7, keys, keys))
    mask = torch.zeros(2, 1, 7, keys, dtype=torch.double)
    mask[1, :, :, -2:] = -torch.inf
    expected = ((query @ key.mT * 0.5 + mask).softmax(-1) @ value).transpose(1, 2)
    outputs = ShortAttention.apply(query, key, value, mask, 0.5)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
    direction = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(outputs, (query, key, value), direction),
        torch.autograd.grad(expected, (query, key, value), direction),
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# Linear layers in training


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_joined_linear_layers_teach_what_each_alone_does(has_bias, autocast):
    """Whole numbers, small enough that bfloat16 holds them and their sums without rounding."""
    layers = [nn.Linear(8, width, bias=has_bias) for width in (6, 3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for parameter in parameters:
        parameter.data = torch.randint(-2, 3, parameter.shape).float()
    inputs = torch.randint(-2, 3, (3, 7, 8)).float().requires_grad_()  # 21 rows, not a multiple of 16
    directions = [torch.randint(-1, 2, (3, 7, width)).float() for width in (6, 3)]
    expected = [F.linear(inputs, layer.weight, layer.bias) for layer in layers]
    gradients = torch.autograd.grad(expected, [inputs, *parameters], directions)
    if not autocast:
        for parameter in parameters:
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = linear_layers(inputs if autocast else inputs.bfloat16(), *layers)
    assert "JoinedProducts" in type(outputs[0].grad_fn).__name__
    for ours, theirs in zip(outputs, expected):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours.float(), theirs)
    directions = [direction.bfloat16() for direction in directions]
    for ours, theirs in zip(torch.autograd.grad(outputs, [inputs, *parameters], directions), gradients):
        assert torch.equal(ours.float(), theirs)


def test_an_unused_output_of_joined_linear_layers_has_no_gradient():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        used, _ = linear_layers(torch.ones(2, 4), *layers)
    used.sum().backward()
    assert (layers[0].weight.grad == 2).all()
    assert not layers[1].weight.grad.any()


def test_linear_layers_that_are_not_plain_are_called():
    class Doubled(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    plain, doubled = nn.Linear(4, 4, bias=False), Doubled(4, 4, bias=False)
    doubled.weight = plain.weight
    with torch.autocast("cpu", torch.bfloat16):
        first, second = linear_layers(torch.ones(2, 4), plain, doubled)
    assert torch.equal(second, 2 * first)


def test_a_hook_of_a_linear_layer_runs():
    layer, seen = nn.Linear(4, 4), []
    layer.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.shape))
    with torch.autocast("cpu", torch.bfloat16):
        linear_layers(torch.ones(2, 4), layer)
    assert seen == [(2, 4)]


def test_products_in_bfloat16_have_few_shapes():
    for most in (512, 2048, 25_000):
        rounded = {rounded_up(count) for count in range(most * 4 // 5, most + 1)}
        assert len(rounded) <= 5
    assert all(count <= rounded_up(count) <= max(count * 9 / 8, count + 15) for count in range(1, 5000))


# Loss (section 5.4)


# One position with probabilities (0.7, 0.1, 0.1, 0.1): -ln 0.7 = 0.356675, -ln 0.1 = 2.302585.
@pytest.mark.parametrize(
    ("label", "epsilon", "loss"),
    [
        (0, 0.0, 0.356675),
        (3, 0.0, 2.302585),
        (0, 0.1, 0.925 * 0.356675 + 0.075 * 2.302585),  # the gold token has 0.9 + 0.1 / 4
        (3, 0.1, 0.925 * 2.302585 + 0.025 * 0.356675 + 0.05 * 2.302585),
        (0, 0.4, 0.7 * 0.356675 + 0.3 * 2.302585),
    ],
)
def test_smoothed_loss_equals_the_hand_written_table(label, epsilon, loss):
    logits = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).log() + 5.0  # a shift of all logits changes nothing
    total = SmoothedCrossEntropy.apply(logits, torch.eye(4), torch.tensor([label]), epsilon)
    assert total.item() == pytest.approx(loss, abs=1e-5)


def test_smoothed_loss_and_gradients_equal_torchs():
    positions = SmoothedCrossEntropy.SLICE + 37  # more than one slice
    hidden = torch.randn(positions, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    labels = torch.randint(0, 50, (positions,))
    expected = F.cross_entropy(hidden @ weight.t(), labels, label_smoothing=0.1, reduction="sum")
    gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    total = SmoothedCrossEntropy.apply(hidden, weight, labels, 0.1)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-3)
    for ours, theirs in zip(torch.autograd.grad(3 * total, (hidden, weight)), gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [37, SmoothedCrossEntropy.BFLOAT16_SLICE + 37])
def test_smoothed_loss_in_bfloat16_is_torchs_up_to_rounding(positions):
    hidden, projection = torch.randn(1, positions, 8, requires_grad=True), nn.Linear(8, 50)
    labels = torch.randint(0, 50, (1, positions))
    labels[0, 3] = -100
    expected = F.cross_entropy(projection(hidden)[0], labels[0], label_smoothing=0.1, reduction="sum")
    targets = (hidden, projection.weight, projection.bias)
    gradients = torch.autograd.grad(expected, targets)
    with torch.autocast("cpu", torch.bfloat16):
        total = projected_cross_entropy(hidden, projection, labels, 0.1, -100)
    torch.testing.assert_close(total, expected, rtol=1e-3, atol=0)
    for ours, theirs in zip(torch.autograd.grad(total, targets), gradients):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


# Steps of a search


@pytest.mark.parametrize("vocabulary", [40, 5000, 5120, 5203])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_continuations_are_the_greatest_sums_of_log_probabilities(vocabulary, dtype):
    torch.manual_seed(vocabulary)
    beams, count = 4, 8
    spread = torch.cat([torch.randperm(beams * vocabulary).view(beams, -1) / vocabulary for _ in range(60)])
    spread[0] = spread[0].flip(0)
    spread[1, :-count] = -torch.inf
    logits, scores = spread.to(dtype), -3 * torch.rand(60, beams)
    scores[5, 1:] = -1e9
    log_probabilities = torch.log_softmax(logits.double(), dim=-1).view(60, beams, -1) + scores[..., None]
    expected = log_probabilities.flatten(1).topk(count).values
    values, parents, tokens = best_continuations(logits, scores, count)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-5)
    found = log_probabilities[torch.arange(60)[:, None], parents, tokens]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    different = (parents * vocabulary + tokens).sort(-1).values.diff(dim=-1)
    assert (different > 0).all()


def test_impossible_words_are_not_among_the_best_continuations():
    logits = torch.full((4, 5203), -torch.inf)
    logits[:, [7, 5202]] = torch.tensor([1.0, 2.0])
    values, parents, tokens = best_continuations(logits, torch.zeros(1, 4), 8)
    assert sorted(zip(parents[0].tolist(), tokens[0].tolist())) == [(b, t) for b in range(4) for t in (7, 5202)]
    assert values.isfinite().all()


def test_a_search_over_many_words_gives_what_the_library_gives():
    model = noisy_model(5, vocab_size=2503)
    for more in (
        {},
        {"length_penalty_form": "gnmt", "length_penalty": 0.6},
        {"suppress_tokens": list(range(5, 2400))},
    ):
        options = {**batch_of([6, 3, 9]), "num_beams": 4, "max_new_tokens": 8, **more}
        assert model.generate(**options).tolist() == model.generate(**options, fast_decoding=False).tolist()


def test_attention_of_a_step_is_not_computed_in_half_precision_on_a_cpu():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert attention_dtype(torch.empty(1, dtype=dtype)) == torch.float32
    assert attention_dtype(torch.empty(1, dtype=torch.float64)) == torch.float64
    assert attention_dtype(torch.empty(1, dtype=torch.bfloat16, device="meta")) == torch.bfloat16


# 8-bit products


@pytest.mark.parametrize("shape", [(1, 12), (5, 12), (2, 3, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_numbers(shape, bias):
    linear, inputs = nn.Linear(12, 7, bias=bias), torch.randn(shape)
    weight_scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    input_scale = inputs.abs().amax(-1, keepdim=True) / 127
    weight = (linear.weight.detach() / weight_scale).round() * weight_scale
    rounded = (inputs / input_scale).round() * input_scale
    expected = nn.functional.linear(rounded, weight, linear.bias)
    outputs = Int8Linear(linear.weight, linear.bias)(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs, linear(inputs), rtol=0.1, atol=0.05)


def test_rows_of_zeros_stay_finite():
    linear = nn.Linear(4, 3)
    nn.init.zeros_(linear.weight)
    assert torch.equal(Int8Linear(linear.weight, linear.bias)(torch.zeros(2, 4)), linear.bias.expand(2, 3))


def test_joined_layers_compute_what_each_does():
    layers = [Int8Linear(torch.randn(size, 8), torch.randn(size)) for size in (3, 5)]
    inputs = torch.randn(4, 8)
    expected = torch.cat([layer(inputs) for layer in layers], dim=-1)
    assert torch.equal(Int8Linear.joined(layers)(inputs), expected)


@pytest.mark.skipif(not has_fused_int8(torch.device("cpu")), reason="oneDNN has no exact 8-bit product here")
@pytest.mark.parametrize("bias", [True, False])
def test_packed_8_bit_weights_give_the_same_numbers_in_every_batch(bias):
    layer = Int8Linear(torch.randn(37, 64), torch.randn(37) if bias else None)
    packed, inputs = PackedInt8Linear(layer), torch.randn(70, 64) * torch.logspace(-3, 3, 70)[:, None]
    expected = layer(inputs)
    for rows in (1, 2, 5, 16, 33, 70):
        assert torch.equal(packed(inputs[:rows]), expected[:rows])
    assert torch.equal(packed(inputs.view(2, 35, 64)), expected.view(2, 35, 37))
    assert packed(inputs.bfloat16()).dtype == torch.bfloat16


@pytest.mark.skipif(not has_fused_int8(torch.device("cpu")), reason="oneDNN has no exact 8-bit product here")
def test_the_greatest_8_bit_sums_do_not_overflow():
    layer = Int8Linear(torch.full((3, 8192), 1.0))
    expected = torch.full((2, 3), 8192.0)
    torch.testing.assert_close(PackedInt8Linear(layer)(torch.ones(2, 8192)), expected)
    torch.testing.assert_close(PackedInt8Linear(layer)(-torch.ones(2, 8192)), -expected)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_an_8_bit_model_generates_the_same_with_fixed_weights(num_beams):
    model = noisy_model(2).to_int8()
    options = {**batch_of([5, 9, 2]), "num_beams": num_beams, "max_extra_tokens": 5}
    expected = model.generate(**options).tolist()
    with model.fixed_weights():
        assert model.generate(**options).tolist() == expected


@torch.no_grad()
def test_an_8_bit_model_is_near_the_model_it_was_made_from():
    model, eight = noisy_model(1), noisy_model(1).to_int8()
    assert not any(type(module) is nn.Linear for module in eight.modules())
    inputs = {**batch_of([7, 4]), "labels": torch.randint(3, 40, (2, 5))}
    logits, near = model(**inputs).logits, eight(**inputs).logits
    assert not torch.equal(logits, near)
    assert (near - logits).norm() < 0.05 * logits.norm()
    torch.testing.assert_close(eight(**inputs).loss, model(**inputs).loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_an_8_bit_model_generates_by_the_fast_loop_what_it_generates_by_the_librarys(num_beams):
    model = noisy_model(2).to_int8()
    options = {**batch_of([5, 9, 2]), "num_beams": num_beams, "max_extra_tokens": 5}
    fast = model.generate(**options)
    assert fast.tolist() == model.generate(**options, fast_decoding=False).tolist()
    alone = model.generate(options["input_ids"][2:, :2], num_beams=num_beams, max_extra_tokens=5)[0]
    assert fast[2, : len(alone)].tolist() == alone.tolist()


def test_an_8_bit_model_has_no_gradients_and_no_tie():
    model = noisy_model(3).to_int8()
    model.tie_weights()
    model.generate(**batch_of([3]), max_new_tokens=2)
    with pytest.raises(RuntimeError, match="no gradients"):
        Int8Linear(torch.randn(3, 4))(torch.randn(2, 4, requires_grad=True))


def test_an_8_bit_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="8-bit model cannot be saved"):
        tiny_model().to_int8().save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
