"""Linear layers in float32 on a CPU, by oneDNN: PyTorch takes it for bfloat16 only, and MKL for float32."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


NARROWEST = 256  # inputs and outputs of a layer that oneDNN is worth its compiling of kernels for


class OneDNNLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, and its gradient in the inputs, by oneDNN. MKL's gradient in the weights is as
    fast."""

    @staticmethod
    def forward(ctx, inputs, weight, bias):
        """`inputs` `(..., in_features)`, `weight` `(out_features, in_features)`, `bias` `(out_features,)`, or none."""
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # (positions, out_features)
        return (
            _product(grad, weight.t(), None) if needs_inputs else None,
            rows.t() @ inputs.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs.contiguous(), weight, bias, "none", [], "")


class OneDNNProducts(TorchFunctionMode):
    """Within, linear layers of some width are trained by oneDNN, where they are float32 on a CPU; everything else is
    as it was.

    The choice depends on a layer's type and shape alone, so that a resumed run ends as one that was never stopped.
    """

    @staticmethod
    def pays(model: nn.Module) -> bool:
        """Whether the model has a layer for it."""
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        return any(_is_wide(layer.weight) for layer in layers)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and _is_meant(*args, **kwargs):
            function = _linear
        return function(*args, **kwargs)


def _linear(input, weight, bias=None) -> torch.Tensor:
    return OneDNNLinear.apply(input, weight, bias)


def _is_meant(input, weight, bias=None) -> bool:
    return (
        input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        and type(weight) in (torch.Tensor, nn.Parameter)  # none that is divided or quantised
        and _is_wide(weight)
        and input.dim() > 1
        and input.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def _is_wide(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and min(weight.shape) >= NARROWEST
