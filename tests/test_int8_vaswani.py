import pytest
import torch
from conftest import tiny_model
from test_generation_vaswani import batch_of, noisy_model
from torch import nn

from hf_vaswani.int8_vaswani import Int8Linear


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
