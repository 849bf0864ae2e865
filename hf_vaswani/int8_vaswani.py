"""Linear layers with 8-bit weights, for faster inference on a CPU."""

from collections.abc import Sequence

import torch
from torch import nn


class Int8Linear(nn.Module):
    """A linear layer whose products are of 8-bit integers.

    Weights have one scale for each output feature, inputs one for each row, found when they come in; so a row's
    result does not depend on the rest of the batch.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`), bias (`(out_features,)`, *optional*): As of
            `nn.Linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float()
        scale = weight.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("weight", (weight / scale[:, None]).round_().to(torch.int8).t().contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @classmethod
    def joined(cls, layers: Sequence["Int8Linear"]) -> "Int8Linear":
        """One layer with the outputs of several, one after the other."""
        joined = cls.__new__(cls)
        nn.Module.__init__(joined)
        joined.in_features, joined.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
        joined.register_buffer("weight", torch.cat([layer.weight for layer in layers], dim=1))
        joined.register_buffer("scale", torch.cat([layer.scale for layer in layers]))
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        joined.register_buffer("bias", bias)
        return joined

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`.

        Raises:
            RuntimeError: A gradient is asked for; whole numbers have none.
        """
        if inputs.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("8-bit layers are for inference: they have no gradients.")
        rows = inputs.reshape(-1, self.in_features).float()
        scale = rows.abs().amax(1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        integers = (rows / scale).round_().to(torch.int8)
        outputs = torch._int_mm(integers, self.weight).float().mul_(scale)
        if self.bias is None:
            outputs.mul_(self.scale)
        else:
            outputs = torch.addcmul(self.bias, outputs, self.scale)
        return outputs.unflatten(0, inputs.shape[:-1]).to(inputs.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


__all__ = ["Int8Linear"]
