"""Linear layers by oneDNN (`training/trainer/onednn.py`), against PyTorch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vaswani import VaswaniForConditionalGeneration
from support.models import tiny_config
from support.runs import make_trainer
from training.trainer.onednn import OneDNNLinear, OneDNNProducts


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="This PyTorch has no oneDNN.")

WIDE = {"d_model": 256, "d_ff": 256, "d_k": 128, "d_v": 128}


class CountingProducts(TorchDispatchMode):
    """Counts products that oneDNN computes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.mkldnn._linear_pointwise.default
        return function(*args, **(kwargs or {}))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_equals_pytorchs_in_float64(shape, biased):
    inputs = torch.randn(*shape, 300, requires_grad=True)
    weight = torch.randn(260, 300, requires_grad=True)
    bias = torch.randn(260, requires_grad=True) if biased else None
    leaves = [leaf for leaf in (inputs, weight, bias) if leaf is not None]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = torch.randn(*shape, 260)

    outputs = OneDNNLinear.apply(inputs, weight, bias)
    outputs.backward(wanted)
    expected = F.linear(*doubles)
    expected.backward(wanted.double())

    assert relative(outputs, expected) < 1e-6
    for leaf, double in zip(leaves, doubles):
        assert relative(leaf.grad, double.grad) < 1e-6


def test_inputs_and_gradients_that_lie_otherwise_in_memory():
    inputs = torch.randn(300, 6, requires_grad=True)
    weight = torch.randn(260, 300)
    OneDNNLinear.apply(inputs.t(), weight, None).sum().backward()  # the gradient is one number, expanded
    torch.testing.assert_close(inputs.grad, weight.sum(0)[:, None].expand(-1, 6), rtol=1e-5, atol=1e-4)


def test_only_the_gradients_that_are_wanted():
    weight = torch.randn(260, 300)
    inputs = torch.randn(4, 300)
    adapter = torch.zeros(260, requires_grad=True)
    OneDNNLinear.apply(inputs, weight, adapter).sum().backward()
    assert torch.equal(adapter.grad, torch.full((260,), 4.0))
    assert weight.grad is None and inputs.grad is None


@pytest.mark.parametrize(
    "layer, inputs",
    [
        (nn.Linear(255, 300), torch.randn(2, 255)),
        (nn.Linear(300, 255), torch.randn(2, 300)),
        (nn.Linear(300, 300).double(), torch.randn(2, 300).double()),
        (nn.Linear(300, 300).bfloat16(), torch.randn(2, 300).bfloat16()),
        (nn.Linear(300, 300), torch.randn(0, 300)),
        (nn.Linear(300, 300), torch.randn(300)),
    ],
    ids=["narrow inputs", "narrow outputs", "float64", "bfloat16", "nothing", "a vector"],
)
def test_everything_else_is_pytorchs(layer, inputs):
    with OneDNNProducts(), CountingProducts() as counted:
        inside = layer(inputs)
    assert counted.count == 0
    assert torch.equal(inside, layer(inputs))


def test_autocast_decides_the_type():
    layer = nn.Linear(300, 300)
    with OneDNNProducts(), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 300)).dtype == torch.bfloat16


def wide_trainer(folder, tokenizer, pairs, **overrides):
    torch.manual_seed(5)
    config = tiny_config(vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1, **WIDE)
    return make_trainer(folder, tokenizer, pairs, VaswaniForConditionalGeneration(config), max_steps=1, **overrides)


def test_a_wide_model_trains_by_onednn(tmp_path, tokenizer, pairs):
    trainer = wide_trainer(tmp_path, tokenizer, pairs, save_strategy="no")
    with CountingProducts() as counted:
        trainer.train()
    # An encoder layer has 4 + 2 products, a decoder layer 4 + 4 + 2; as many are gradients in their inputs.
    assert counted.count == 2 * (6 + 10)


def gradients_of_first_update(trainer) -> dict[str, torch.Tensor]:
    found = {}
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(
        lambda *_: found.update((name, weight.grad.clone()) for name, weight in trainer.model.named_parameters())
    )
    trainer.train()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_its_gradients_are_those_of_pytorchs_products(checkpointing, tmp_path, tokenizer, pairs):
    plain = wide_trainer(tmp_path / "plain", tokenizer, pairs, save_strategy="no")
    plain._uses_onednn = False
    expected = gradients_of_first_update(plain)
    trainer = wide_trainer(
        tmp_path / "ours", tokenizer, pairs, save_strategy="no", gradient_checkpointing=checkpointing
    )
    gradients = gradients_of_first_update(trainer)
    assert len(expected) > 20
    for name, gradient in expected.items():
        assert relative(gradients[name], gradient) < 1e-5, name


def test_a_narrow_model_is_left_alone(tmp_path, tokenizer, pairs):
    assert not OneDNNProducts.pays(make_trainer(tmp_path, tokenizer, pairs).model)
