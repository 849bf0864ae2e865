"""Limits of the processor: the time of the matrix products alone, and the bandwidth of memory."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from hf_vaswani import VaswaniConfig
from hf_vaswani.kernels_vaswani import pack

from .systems import load


# Products with weights, and those of attention, in the names of the profiler.
LINEAR = {
    *("aten::mm", "aten::addmm", "aten::_int_mm"),
    *("mkldnn::_linear_pointwise", "onednn::qlinear_pointwise"),
}
PRODUCTS = LINEAR | {"aten::bmm", "aten::baddbmm"}
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
COPIES = 24
READ = 2**30  # bytes of the sum that measures the bandwidth: more than caches hold

Shape = tuple[int, int, int]  # rows, input features, output features
Product = Callable[[torch.Tensor], torch.Tensor]


def share_of_limit(
    system: str, root: Path, batch: str, sentences: list[list[int]], step_bytes: int
) -> tuple[float, float]:
    """Search in one thread, and find what the matrix products take of its time.

    Args:
        system, root: As for `load`.
        batch (`str`): Batch size of the search.
        sentences (`list[list[int]]`): Sentences to translate.
        step_bytes (`int`): Bytes of weights that a step reads, see `decoder_bytes`.

    Returns:
        The share of the profile that is spent in matrix products, those of attention included. And the share of the
        matrix product limit: the time that the products with weights alone would need, divided by the time of the
        same search without the profiler. The products have the shapes and the number of the search's, as the profiler
        has recorded them. Each shape is timed by itself, with kernels compiled, by the fastest product for the type
        that torch has here. Attention, quantising, norms and all else count as distance to the limit.
    """
    torch.set_num_threads(1)
    search = load(system, root).search(batch)
    search(sentences[:8])
    start = time.perf_counter()
    search(sentences)
    seconds = time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        search(sentences)
    events = profile.key_averages(group_by_input_shape=True)
    times = [(event.key in PRODUCTS, event.self_cpu_time_total) for event in events]
    share = sum(t for is_product, t in times if is_product) / sum(t for _, t in times)
    alone = seconds_of(linear_products(events), system.split("-")[1], step_bytes)
    return share, alone / seconds


def linear_products(events: Iterable) -> Counter[Shape]:
    """Number of products with weights by shape, from averages of the profiler that are grouped by input shape."""
    products: Counter[Shape] = Counter()
    for event in events:
        if event.key in LINEAR:
            inputs, weight = [shape for shape in event.input_shapes if len(shape) > 1][:2]
            inner = inputs[-1]
            products[math.prod(inputs[:-1]), inner, math.prod(weight) // inner] += event.count
    return products


@torch.no_grad()
def seconds_of(products: Counter[Shape], dtype: str, step_bytes: int) -> float:
    """Time that products need one after the other, in this thread.

    Matrices of the same shape take turns, up to `COPIES` of them, so that about `step_bytes` bytes of other weights
    are read between two uses of one. Otherwise caches would hold more than in a search.
    """
    total = 0.0
    for inner, outer in sorted({(inner, outer) for _, inner, outer in products}):
        copies = min(COPIES, 1 + step_bytes // (inner * outer * BYTES[dtype]))
        candidates = [[make(inner, outer) for _ in range(copies)] for make in products_of(dtype)]
        for (rows, *matrix), count in products.items():
            if matrix == [inner, outer]:
                total += count * min(_seconds_each(layers, rows, inner, dtype) for layers in candidates)
    return total


def products_of(dtype: str) -> list[Callable[[int, int], Product]]:
    """Ways to multiply rows by a random matrix of so many input and output features. Which one is the fastest in 8
    bits depends on the processor: only the packed one knows the matrix instructions of recent ones."""
    if dtype == "int8":
        return [_int8_product, _packed_int8_product]
    return [lambda inner, outer: pack(nn.Linear(inner, outer, dtype=getattr(torch, dtype)))]


def _int8_product(inner: int, outer: int) -> Product:
    weight = torch.randint(-127, 128, (inner, outer), dtype=torch.int8)
    return lambda inputs: torch._int_mm(inputs, weight)


def _packed_int8_product(inner: int, outer: int) -> Product:
    weight = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 128, (outer, inner), dtype=torch.int8), None)
    scales, zeros = torch.ones(outer), torch.zeros(outer, dtype=torch.int64)
    rest = (weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda inputs: torch.ops.onednn.qlinear_pointwise(inputs.view(torch.uint8), 1.0, 128, *rest)


def _seconds_each(layers: list[Callable], rows: int, inner: int, dtype: str) -> float:
    inputs = torch.ones(rows, inner, dtype=getattr(torch, dtype))
    layers[0](inputs)  # compiles the kernel
    times = []
    for layer in layers if len(layers) > 4 else layers * 4:
        start = time.perf_counter()
        layer(inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth(threads: int) -> float:
    """Bytes that this machine reads from memory in a second, by the best of several sums of a large tensor."""
    torch.set_num_threads(threads)
    tensor = torch.ones(READ // 4)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        tensor.sum()
        times.append(time.perf_counter() - start)
    return READ / min(times)


def decoder_bytes(config: VaswaniConfig, dtype: str) -> int:
    """Bytes of the weight matrices that every step of decoding reads: the decoder's, without the keys and values of
    the source, which are projected once, and the output projection."""
    keys, values = config.num_heads * config.d_k, config.num_heads * config.d_v
    attention, source_attention = config.d_model * 2 * (keys + values), config.d_model * (keys + values)
    layer = attention + source_attention + 2 * config.d_model * config.d_ff
    return (config.decoder_layers * layer + config.d_model * config.vocab_size) * BYTES[dtype]
