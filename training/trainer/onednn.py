"""Route wide float32 linear layers on a CPU through oneDNN; PyTorch itself uses MKL for float32."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


NARROWEST = 256  # inputs and outputs of a linear layer; below it, kernel compilation costs more than it saves


class OneDNNLinear(torch.autograd.Function):
    """`torch.nn.functional.linear` and its input gradient by oneDNN.

    The weight gradient is left to MKL, which is as fast.
    """

    @staticmethod
    def forward(ctx, inputs, weight, bias):
        """Compute the outputs `(..., out_features)`.

        Args:
            inputs (`torch.Tensor` of shape `(..., in_features)`): Input features.
            weight (`torch.Tensor` of shape `(out_features, in_features)`): Weight matrix.
            bias (`torch.Tensor` of shape `(out_features,)`, *optional*): Bias.
        """
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        flat_grad = grad.flatten(0, -2)  # (positions, out_features)
        return (
            _product(grad, weight.t(), None) if needs_inputs else None,
            flat_grad.t() @ inputs.flatten(0, -2) if needs_weight else None,
            flat_grad.sum(0) if needs_bias else None,
        )


def _product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs.contiguous(), weight, bias, "none", [], "")


class OneDNNProducts(TorchFunctionMode):
    """Route wide float32 linear layers on a CPU through oneDNN; leave every other call alone.

    The choice depends only on the dtype and shape of a layer, so a resumed run is identical to an uninterrupted one.
    """

    @staticmethod
    def pays(model: nn.Module) -> bool:
        """True if the model has a linear layer that is wide enough for oneDNN."""
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        return any(_is_wide(layer.weight) for layer in layers)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and _is_eligible(*args, **kwargs):
            function = _linear
        return function(*args, **kwargs)


def _linear(input, weight, bias=None) -> torch.Tensor:
    return OneDNNLinear.apply(input, weight, bias)


def _is_eligible(input, weight, bias=None) -> bool:
    return (
        input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        and type(weight) in (torch.Tensor, nn.Parameter)  # neither sharded nor quantised
        and _is_wide(weight)
        and input.dim() > 1
        and input.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def _is_wide(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and min(weight.shape) >= NARROWEST
