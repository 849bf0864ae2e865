"""The same results, faster on a CPU: dropout, attention of short sentences, the loss, packed and 8-bit products.

Each function here computes what a line of plain PyTorch would. The model reads as well without them.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import nn
from torch.nn import functional as F


GROUP = 32  # tokens of the vocabulary whose greatest logit stands for them in the search for the best
IN_CACHE = 2**18  # float32 numbers that stay in the processor's cache between two passes
SHORT = 32  # tokens: up to this length of a sentence, plain matrix products train faster than fused attention on a CPU


def dropout(hidden_states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Dropout (section 5.4), as `torch.nn.functional.dropout`, but several times faster on a CPU.

    PyTorch draws one random number for each element there, in one thread. Here each 64-bit random number decides about
    four elements, with 16 bits each; `p` is rounded to a multiple of 2⁻¹⁶.
    """
    if not training or p == 0:
        return hidden_states
    if hidden_states.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(hidden_states, p=p, training=True)
    count = hidden_states.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    dropped = min(round(p * 2**16), 2**16 - 1)  # of the 2¹⁶ values
    kept = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)  # ones and zeros: faster than booleans
    torch.ge(words.view(torch.int16)[:count].view(hidden_states.shape), dropped - 2**15, out=kept)
    return hidden_states * kept.mul_(2**16 / (2**16 - dropped))


def fastest_attention(fused: Callable, query: torch.Tensor, key: torch.Tensor, dropout: float) -> Callable:
    """Choose the fastest way on a CPU to compute `fused`, the attention function of `sdpa`, with its gradients.

    Short sentences take plain matrix products, which need half the time. In bfloat16, gradients take eight times as
    long as in float32, so attention is computed in float32. Without gradients the choice is `fused`.

    Args:
        fused (`Callable`): Attention function in the form of `ALL_ATTENTION_FUNCTIONS`.
        query (`torch.Tensor` of shape `(batch, h, queries, d_k)`), key (`(batch, h, keys, d_k)`): Projected heads.
        dropout (`float`): Probability with which a weight is dropped.
    """
    if query.device.type != "cpu" or not torch.is_grad_enabled():
        return fused
    is_short = query.shape[2] * key.shape[2] <= SHORT**2
    if is_short and not dropout and not torch.compiler.is_compiling():
        return _short_attention
    return partial(_float32_attention, fused) if query.dtype == torch.bfloat16 else fused


def _short_attention(module: nn.Module, query, key, value, attention_mask, scaling: float, **kwargs):
    """`ShortAttention` with the masks of `sdpa`: booleans, true on keys that count; numbers to add; or none, where
    all keys count, or all earlier ones."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and module.is_causal and queries > 1:
        attention_mask = torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = (~attention_mask).float() * torch.finfo(torch.float32).min
    with torch.autocast("cpu", enabled=False):
        return ShortAttention.apply(query, key, value, attention_mask, scaling), None


class ShortAttention(torch.autograd.Function):
    """Scaled dot-product attention of short sentences (section 3.2.1) by plain products, in float32 on a CPU.

    With `P = softmax(s Q Kᵀ + mask)` and outputs `O = P V` of gradient `dO`, the gradients are `dV = Pᵀ dO` and, with
    `dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O))`, `dQ = s dS K` and `dK = s dSᵀ Q`.

    Softmax takes ten times as long for fewer than 16 numbers, the width of a register. So keys are padded to 16.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, scaling):
        """Outputs `(batch, queries, h, d_v)` of `query` `(batch, h, queries, d_k)`, `key` `(batch, h, keys, d_k)`,
        `value` `(batch, h, keys, d_v)` and `mask`, numbers to add that fit `(batch, h, queries, keys)`, or `None`."""
        (batch, h, queries, _), keys = query.shape, key.shape[2]
        width = max(keys, 16)
        q, k, v = _heads(query, queries).mul_(scaling), _heads(key, width), _heads(value, width)
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch, h, queries, width)
        if mask is not None:
            scores[..., :keys] += mask
        scores[..., keys:] = -torch.inf
        weights = scores.softmax(-1).flatten(0, 1)
        outputs = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, weights, outputs)
        ctx.sizes, ctx.scaling, ctx.dtype = (batch, h, queries, keys), scaling, query.dtype
        outputs = outputs.view(batch, h, queries, -1).transpose(1, 2)
        return outputs.to(query.dtype, memory_format=torch.contiguous_format)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, weights, outputs = ctx.saved_tensors
        batch, h, queries, keys = ctx.sizes
        grad = _heads(grad.transpose(1, 2), queries)
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        grad_scores = torch.bmm(grad, v.transpose(1, 2))
        grad_scores.sub_((grad * outputs).sum(-1, keepdim=True)).mul_(weights)
        grad_q = torch.bmm(grad_scores, k).mul_(ctx.scaling)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
        parts = [part.unflatten(0, (batch, h)) for part in (grad_q, grad_k[:, :keys], grad_v[:, :keys])]
        return *(part.to(ctx.dtype) for part in parts), None, None


def _heads(states: torch.Tensor, length: int) -> torch.Tensor:
    """`states` `(batch, h, positions, width)` in float32, `(batch * h, length, width)`, padded with zeros."""
    batch, h, positions, width = states.shape
    heads = states.new_empty(batch, h, length, width, dtype=torch.float32)
    heads[:, :, :positions] = states
    heads[:, :, positions:] = 0
    return heads.flatten(0, 1)


def _float32_attention(attention: Callable, module: nn.Module, query, key, value, attention_mask, **kwargs):
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast(query.device.type, enabled=False):
        outputs, weights = attention(module, query.float(), key.float(), value.float(), attention_mask, **kwargs)
    return outputs.to(query.dtype), weights


def linear_layers(inputs: torch.Tensor, *layers: nn.Module) -> Sequence[torch.Tensor]:
    """Compute `[layer(inputs) for layer in layers]`, when training in bfloat16 on a CPU as one product.

    Args:
        inputs (`torch.Tensor` of shape `(..., in_features)`): Inputs of all layers.
        *layers (`nn.Linear`): Linear layers; ones that are adapted or quantised are called as they are.

    Returns:
        Outputs of each layer, `(..., out_features)`.
    """
    if (
        inputs.device.type != "cpu"
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not all(is_plain_product(layer) for layer in layers)
        or {product_dtype(layer.weight) for layer in layers} != {torch.bfloat16}
        or len({layer.bias is None for layer in layers}) > 1
    ):
        return [layer(inputs) for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return JoinedProducts.apply(inputs, len(layers), *(layer.weight for layer in layers), *biases)


def linear(inputs: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Compute `layer(inputs)`; see [`linear_layers`]."""
    return linear_layers(inputs, layer)[0]


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """Type in which products with a weight are computed: that of autocast, if it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class JoinedProducts(torch.autograd.Function):
    """Several linear layers of the same inputs as one product in bfloat16, whose gradients are two products.

    oneDNN compiles a kernel for each new shape of a product, which takes as long as the product in a small model. So
    the number of rows is rounded up. The rows of zeros cost no pass of their own: inputs and gradients are copied in
    any case, to join them or to change their type.
    """

    @staticmethod
    def forward(ctx, inputs, count, *parameters):
        """Outputs of `count` layers, of `inputs` `(..., in_features)` and the weights and then the biases, if any, of
        all layers."""
        weights, biases = parameters[:count], parameters[count:]
        weight = torch.cat([weight.to(torch.bfloat16) for weight in weights])
        bias = torch.cat([bias.to(torch.bfloat16) for bias in biases]) if biases else None
        rows = padded_rows([inputs], torch.bfloat16)
        ctx.save_for_backward(rows, weight)
        ctx.shape, ctx.dtype, ctx.weight_dtype = inputs.shape, inputs.dtype, weights[0].dtype
        ctx.widths, ctx.has_bias = [len(weight) for weight in weights], bias is not None
        outputs = F.linear(rows, weight, bias)[: inputs.shape[:-1].numel()]
        return tuple(part.unflatten(0, inputs.shape[:-1]) for part in outputs.split(ctx.widths, dim=1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        rows, weight = ctx.saved_tensors
        grad, grad_inputs = padded_rows(grads, torch.bfloat16), None
        if ctx.needs_input_grad[0]:
            grad_inputs = (grad @ weight)[: ctx.shape[:-1].numel()].view(ctx.shape).to(ctx.dtype)
        parts = (grad.t() @ rows).split(ctx.widths)
        parts += grad.sum(0).split(ctx.widths) if ctx.has_bias else ()
        return grad_inputs, None, *(part.to(ctx.weight_dtype) for part in parts)


def padded_rows(states: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Join tensors `(..., features)` along their features as a matrix in `dtype`, with rows of zeros at its end."""
    count, widths = states[0].shape[:-1].numel(), [part.shape[-1] for part in states]
    rows = states[0].new_empty(rounded_up(count), sum(widths), dtype=dtype)
    rows[count:] = 0
    for place, part in zip(rows[:count].split(widths, dim=1), states, strict=True):
        place.view(part.shape).copy_(part)
    return rows


def rounded_up(count: int) -> int:
    """Round a number up, by at most an eighth, to one of eight between two powers of two, or to a multiple of 16."""
    step = max(16, 2 ** (count - 1).bit_length() // 16)
    return -(-count // step) * step


def projected_cross_entropy(
    hidden_states: torch.Tensor, projection: nn.Linear, labels: torch.Tensor, epsilon: float, ignored: int
) -> torch.Tensor:
    """Sum of the label-smoothed losses of the logits `projection(hidden_states)`, without keeping the logits.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, target, d_model)`): Outputs of the decoder.
        projection (`nn.Linear`): Output projection, from `d_model` to `vocab_size` features.
        labels (`torch.Tensor` of shape `(batch, target)`): Target tokens.
        epsilon (`float`): Label smoothing.
        ignored (`int`): Label of positions without a target.

    Returns:
        `torch.Tensor` of shape `()`, float32.
    """
    kept = labels != ignored
    hidden_states, labels, weight = hidden_states[kept], labels[kept], projection.weight
    if projection.bias is not None:  # the weight of a feature that is always 1
        hidden_states = F.pad(hidden_states, (0, 1), value=1.0)
        weight = torch.cat((weight, projection.bias[:, None]), dim=1)
    if not torch.is_grad_enabled():
        hidden_states, weight = hidden_states.detach(), weight.detach()  # or gradients would be computed
    return SmoothedCrossEntropy.apply(hidden_states, weight, labels, epsilon)


def is_plain_product(layer: nn.Module) -> bool:
    """Check that a linear layer is a product with a matrix at hand: not adapted, quantised, offloaded, sharded or
    hooked."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return (
        not any(hooks)
        and type(layer) is nn.Linear
        and type(layer.weight) in (nn.Parameter, torch.Tensor)
        and "forward" not in vars(layer)  # hooks that offload or shard a module replace its forward
    )


class SmoothedCrossEntropy(torch.autograd.Function):
    """Output projection and label-smoothed loss (section 5.4) in one function, a slice of positions at a time.

    With `z = W h` the logits of a position, `lse` their log-sum-exp, `y` its label and smoothing by `ε` over the
    whole vocabulary of `V` tokens, the loss is `(lse - z_y) + ε (z_y - mean z)`, and its gradients are

    - in `h`: `Wᵀ softmax(z) - (1 - ε) W_y - ε mean W`,
    - in `W`: `softmax(z) hᵀ`, less `(1 - ε) h` in row `y` and `ε / V h` in every row, summed over positions.

    Only `softmax` needs the logits, and only once. The full `(positions, V)` matrix never exists.
    """

    SLICE = 512  # positions: large enough for full-speed matrix products, small enough for the cache
    BFLOAT16_SLICE = 2048  # on a CPU, where adding up the weight's gradients in float32 costs as much as a product

    @staticmethod
    def forward(ctx, hidden_states, weight, labels, epsilon):
        """Sum of the losses, float32, of `hidden_states` `(positions, d_model)`, `weight` `(V, d_model)` and `labels`
        `(positions,)`."""
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dtype = product_dtype(weight)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        count = len(hidden_states)
        in_bfloat16 = hidden_states.device.type == "cpu" and dtype == torch.bfloat16
        if in_bfloat16:  # the rows of zeros at its end add nothing to the gradients
            hidden_states = padded_rows([hidden_states], dtype)
        padded_labels = F.pad(labels, (0, len(hidden_states) - count))
        mean_weight = weight.float().mean(0)
        grad_hidden = torch.empty_like(hidden_states, dtype=torch.float32) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        loss = hidden_states.new_zeros((), dtype=torch.float32)
        # The same memory for every slice: fresh pages would cost as much as a matrix product.
        size = SmoothedCrossEntropy.BFLOAT16_SLICE if in_bfloat16 else SmoothedCrossEntropy.SLICE
        products = hidden_states.new_empty(min(size, len(hidden_states)), len(weight))
        for start in range(0, len(hidden_states), size):
            rows = slice(start, start + size)
            hidden, label = hidden_states[rows], padded_labels[rows]
            product = torch.mm(hidden, weight.t(), out=products[: len(hidden)])
            gold = product.gather(-1, label[:, None])[:, 0].float()
            highest, total = softmax_numerators_(product)
            lse = (highest + total.log())[:, 0]
            loss += (lse - gold + epsilon * (gold - hidden.float() @ mean_weight))[: count - start].sum()
            if needs_grad:  # softmax is `product / total`: dividing afterwards is cheaper
                grad_hidden[rows] = (product @ weight).float() / total
                if dtype == grad_weight.dtype:
                    grad_weight.addmm_(product.t(), hidden / total)
                else:
                    grad_weight += product.t() @ (hidden / total).to(dtype)
        if needs_grad:
            grad_hidden, hidden_states = grad_hidden[:count], hidden_states[:count].float()
            grad_hidden -= (1 - epsilon) * weight[labels] + epsilon * mean_weight
            grad_weight -= epsilon / len(weight) * hidden_states.sum(0)
            grad_weight.index_add_(0, labels, hidden_states, alpha=epsilon - 1)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None


def softmax_numerators_(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace logits `(positions, V)` by their exponentials less the greatest, computed in float32.

    Returns:
        The greatest logit and the sum of the exponentials, each `(positions, 1)` in float32.
    """
    in_place = logits.dtype == torch.float32
    rows = len(logits) if in_place or logits.device.type != "cpu" else max(1, IN_CACHE // logits.shape[1])
    highest = logits.new_empty(len(logits), 1, dtype=torch.float32)
    total = torch.empty_like(highest)
    floats = None if in_place else logits.new_empty(rows, logits.shape[1], dtype=torch.float32)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        wide = logits[part] if in_place else floats[: len(logits[part])].copy_(logits[part])
        torch.amax(wide, -1, keepdim=True, out=highest[part])
        torch.sum(wide.sub_(highest[part]).exp_(), -1, keepdim=True, out=total[part])
        if not in_place:
            logits[part] = wide
    return highest, total


class PackedLinear:
    """Several linear layers as one, with concatenated outputs and with weights in the processor's own layout.

    Without packing, oneDNN reorders the weights on a CPU in every call. For the few rows of a decoding step that takes
    as long as the product.

    Args:
        *layers (`nn.Linear` or `Int8Linear`): All of one class, with a bias or all without.
    """

    def __init__(self, *layers: nn.Module):
        self.weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        self.bias = layers[0].bias
        if self.bias is not None and len(layers) > 1:
            self.bias = torch.cat([layer.bias for layer in layers])
        self.is_packed = (
            self.weight.device.type == "cpu"
            and self.weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available()
            and torch.backends.mkldnn.enabled
        )
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous(), None)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """`(rows, in_features)` to `(rows, out_features)`."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return F.linear(inputs, self.weight, self.bias)


def pack(
    *layers: nn.Module, for_many_calls: bool = False, for_few_rows: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Join linear layers, `nn.Linear` or `Int8Linear`, into one function with concatenated outputs.

    Packing 8-bit weights takes as long as a few sentences, so it is done only `for_many_calls` of `generate()`. Few
    rows multiply as fast with float32 weights as they are.
    """
    if for_few_rows and all(type(layer) is nn.Linear and layer.weight.dtype == torch.float32 for layer in layers):
        return layers[0] if len(layers) == 1 else lambda inputs: torch.cat([layer(inputs) for layer in layers], dim=-1)
    if len({(type(layer), layer.bias is None) for layer in layers}) > 1:
        parts = [pack(layer, for_many_calls=for_many_calls) for layer in layers]
        return lambda inputs: torch.cat([part(inputs) for part in parts], dim=-1)
    if isinstance(layers[0], Int8Linear):
        joined = Int8Linear.joined(layers)
        return PackedInt8Linear(joined) if for_many_calls and has_fused_int8(joined.weight.device) else joined
    return PackedLinear(*layers)


def attention_dtype(states: torch.Tensor) -> torch.dtype:
    """Type in which a decoding step computes attention: float32 on a CPU, where oneDNN would compile a kernel in half
    precision for every new length."""
    return torch.float32 if states.device.type == "cpu" and states.dtype.itemsize < 4 else states.dtype


def best_continuations(
    logits: torch.Tensor, scores: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greatest `count` of `scores[..., None] + log_softmax(logits)` of each sentence, best first.

    On a CPU, passes over all logits would take longer than the product that made them. So they are made a few rows at
    a time, in the processor's cache, and log probabilities are computed only for the groups of tokens with the
    greatest maxima.

    Args:
        logits (`torch.Tensor` of shape `(sentences * beams, vocab_size)`): Logits of the next token.
        scores (`torch.Tensor` of shape `(sentences, beams)`): Log probabilities so far.
        count (`int`): Continuations of each sentence.

    Returns:
        Log probabilities, beams and tokens, each `(sentences, count)`.
    """
    (rows, vocabulary), (sentences, beams) = logits.shape, scores.shape
    groups = -(-vocabulary // GROUP)  # of the tokens that are equal modulo `groups`
    if logits.device.type != "cpu" or beams * groups < 4 * count:
        log_probabilities = logits.float().log_softmax(-1).unflatten(0, (sentences, beams))
        top, places = log_probabilities.add_(scores[..., None]).flatten(1).topk(count)
        return top, places // vocabulary, places % vocabulary
    slice_rows = max(1, IN_CACHE // vocabulary)
    floats = logits.new_empty(min(rows, slice_rows), groups * GROUP, dtype=torch.float32)
    maxima, highest = floats.new_empty(rows, groups), floats.new_empty(rows, 1)
    totals = torch.empty_like(highest)
    for start in range(0, rows, slice_rows):
        part = slice(start, start + slice_rows)
        wide = floats[: len(logits[part])]
        wide[:, :vocabulary] = logits[part]
        wide[:, vocabulary:] = -torch.inf
        torch.amax(wide.unflatten(1, (GROUP, groups)), 1, out=maxima[part])
        torch.amax(maxima[part], 1, keepdim=True, out=highest[part])
        wide.sub_(highest[part]).clamp_(min=-80)  # exp(-80) adds nothing to 1, but numbers below 1e-38 take very long
        torch.sum(wide.exp_(), 1, keepdim=True, out=totals[part])
    totals.log_()
    offsets = scores.reshape(-1, 1)
    best = (maxima - highest - totals + offsets).view(sentences, -1).topk(count, sorted=False).indices
    parents = (best // groups)[..., None].expand(-1, -1, GROUP)  # (sentences, count, GROUP)
    tokens = (best % groups)[..., None] + torch.arange(GROUP) * groups
    row = parents[..., :1] + torch.arange(0, rows, beams)[:, None, None]  # (sentences, count, 1)
    values = logits[row, tokens.clamp(max=vocabulary - 1)].float()
    values = values - highest[row, 0] - totals[row, 0] + offsets[row, 0]
    values.masked_fill_(tokens >= vocabulary, -torch.inf)
    top, index = values.flatten(1).topk(count)
    return top, parents.flatten(1).gather(1, index), tokens.flatten(1).gather(1, index)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, computed in float32.

    On a CPU, torch takes many times as long for fewer than 16 numbers, the width of a register, as for 16. Shorter
    rows are padded.
    """
    wide, length = scores.float(), scores.shape[-1]
    if length < 16 and scores.device.type == "cpu":
        wide = F.pad(wide, (0, 16 - length), value=-torch.inf)
    return wide.softmax(-1)[..., :length].to(scores.dtype)


class Int8Linear(nn.Module):
    """Linear layer with 8-bit weights and dynamically quantised 8-bit inputs, for inference on a CPU.

    Weights have one scale for each output feature, inputs one scale for each row. A row's result does not depend on
    the rest of the batch.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): Weight of an `nn.Linear`.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): Its bias.
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
        """Join several layers into one with concatenated outputs."""
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
            RuntimeError: A gradient is needed; integers have none.
        """
        if inputs.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("8-bit layers are for inference: they have no gradients.")
        integers, scale = quantize_rows(inputs.reshape(-1, self.in_features))
        outputs = scale_rows(torch._int_mm(integers, self.weight), scale, self.scale, self.bias)
        return outputs.unflatten(0, inputs.shape[:-1]).to(inputs.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `rows` `(rows, features)` to 8-bit integers, with one scale `(rows, 1)` for each row."""
    rows = rows.float()
    compiled = compiled_kernels(rows.device)
    return _quantize_rows(rows) if compiled is None else compiled.quantize_rows(rows)


def _quantize_rows(rows):
    scale = rows.abs().amax(1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scale).round_().to(torch.int8), scale


def scale_rows(
    products: torch.Tensor, scale: torch.Tensor, column_scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute `products * column_scale * scale + bias`.

    Args:
        products (`torch.Tensor` of shape `(rows, features)`): int32, or float32, which may be overwritten.
        scale (`torch.Tensor` of shape `(rows, 1)`): Scale of each row.
        column_scale (`torch.Tensor` of shape `(features,)`): Scale of each feature; `None` if products are float32.
        bias (`torch.Tensor` of shape `(features,)`, *optional*): Numbers to add to every row.

    Returns:
        `torch.Tensor` of shape `(rows, features)`, float32.
    """
    compiled = compiled_kernels(products.device)
    if compiled is None:
        return _scale_rows(products, scale, column_scale, bias)
    if column_scale is not None:
        return compiled.scale_rows(products, scale, column_scale, bias)
    compiled.scale_rows_(products, scale, bias)
    return products


def _scale_rows(products, scale, column_scale, bias):
    outputs = products if column_scale is None else products.float().mul_(column_scale)
    return outputs.mul_(scale) if bias is None else torch.addcmul(bias, outputs, scale)


def compiled_kernels(device: torch.device):
    """Operators of `kernels.cpp`; `None` where `compiled.py` has not loaded them, or cannot be used."""
    return None if device.type != "cpu" or torch.compiler.is_compiling() else _compiled_kernels()


@cache
def _compiled_kernels():
    operators = torch.ops.hf_vaswani
    if not hasattr(operators, "scale_rows_"):
        return None
    rows, bias = torch.linspace(-1, 1, 7 * 64).view(7, 64), torch.linspace(-3, 3, 64)
    integers, scale = _quantize_rows(rows)
    expected = _scale_rows(integers.int(), scale, bias.abs(), bias)
    return operators if torch.equal(operators.scale_rows(integers.int(), scale, bias.abs(), bias), expected) else None


class PackedInt8Linear:
    """The numbers of an [`Int8Linear`], from packed weights and without the 32-bit integers in between."""

    def __init__(self, layer: Int8Linear):
        self.weight = torch.ops.onednn.qlinear_prepack(layer.weight.t().contiguous(), None)  # it ignores strides
        self.scale, self.bias = layer.scale, layer.bias
        self.zeros = torch.zeros(layer.out_features, dtype=torch.int32)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        integers, scale = quantize_rows(inputs.flatten(0, -2))
        outputs = torch.ops.onednn.qlinear_pointwise(
            *(integers, 1.0, 0, self.weight, self.scale, self.zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return scale_rows(outputs, scale, None, self.bias).unflatten(0, inputs.shape[:-1]).to(inputs.dtype)


@cache
def has_fused_int8(device: torch.device) -> bool:
    """Check that oneDNN multiplies 8-bit integers here: all of them in the right order, and without overflow."""
    if device.type != "cpu" or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    numbers = torch.linspace(-1, 1, 7 * 64).view(7, 64)
    numbers[0] = 1
    layer = Int8Linear(numbers)
    try:
        return torch.equal(PackedInt8Linear(layer)(numbers), layer(numbers))
    except (AttributeError, RuntimeError):  # an older torch, or a processor that oneDNN does not support
        return False


def quantize_linear_layers(model: nn.Module) -> None:
    """Replace every `nn.Linear` in a module by an [`Int8Linear`], in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child.weight, child.bias))


__all__ = [
    "Int8Linear",
    "PackedInt8Linear",
    "PackedLinear",
    "attention_dtype",
    "best_continuations",
    "compiled_kernels",
    "dropout",
    "fastest_attention",
    "has_fused_int8",
    "is_plain_product",
    "linear",
    "linear_layers",
    "pack",
    "projected_cross_entropy",
    "quantize_linear_layers",
    "quantize_rows",
    "scale_rows",
    "softmax",
]
