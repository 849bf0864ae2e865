"""The optional kernels in C++ give PyTorch's numbers, and are missed nowhere."""

import os
import subprocess
import sys

import pytest
import torch

from hf_vaswani import compiled
from support.paths import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache of Hugging Face."""
    monkeypatch.setattr(compiled.constants, "HF_ASSETS_CACHE", str(tmp_path))
    return tmp_path


SAME_NUMBERS = """
import torch
import hf_vaswani
from hf_vaswani import compiled, kernels_vaswani

kernels = kernels_vaswani.compiled_kernels(torch.device("cpu"))
assert compiled.kernel_file().exists() and kernels is not None

torch.manual_seed(0)
for rows in (1, 2, 70):
    for features in (1, 15, 64, 515):
        numbers = torch.randn(rows, features) * torch.logspace(-20, 20, rows)[:, None]
        numbers[0, 0] = 0
        scale = numbers.abs().amax(1, keepdim=True).div(127).clamp(min=torch.finfo(torch.float32).tiny)
        integers, scales = kernels.quantize_rows(numbers)
        assert torch.equal(scales, scale) and torch.equal(integers, (numbers / scale).round().to(torch.int8))
        strided = numbers.t().contiguous().t()
        assert torch.equal(kernels.quantize_rows(strided)[0], integers)

        products = torch.randint(-(2**30), 2**30, (rows, features), dtype=torch.int32)
        column_scale = torch.rand(features)
        floats = products.float() * column_scale
        bias = torch.randn(features)
        assert torch.equal(kernels.scale_rows(products, scale, column_scale, bias), torch.addcmul(bias, floats, scale))
        assert torch.equal(kernels.scale_rows(products, scale, column_scale, None), floats * scale)
        for offsets, expected in ((bias, torch.addcmul(bias, floats, scale)), (None, floats * scale)):
            outputs = floats.clone()
            kernels.scale_rows_(outputs, scale, offsets)
            assert torch.equal(outputs, expected)

assert torch.equal(kernels.quantize_rows(torch.zeros(2, 20))[0], torch.zeros(2, 20, dtype=torch.int8))
assert kernels.quantize_rows(torch.full((1, 20), torch.nan))[1].isnan().all()
assert kernels.quantize_rows(torch.zeros(0, 4))[0].shape == (0, 4)

layer = kernels_vaswani.Int8Linear(torch.randn(33, 64), torch.randn(33))
inputs = torch.randn(5, 64)
outputs = layer(inputs)
kernels_vaswani._compiled_kernels = lambda: None
assert torch.equal(layer(inputs), outputs)
print("compared")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the flags are those of GCC and Clang")
def test_compiled_kernels_give_the_numbers_of_pytorch(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for command in (["-m", "training.cli", "compile"], ["-m", "training.cli", "compile"], ["-c", SAME_NUMBERS]):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "compared\n"
    assert [path.suffix for path in tmp_path.glob("assets/hf_vaswani/*")] == [".so"]


def test_a_library_that_cannot_be_loaded_is_named(folder, caplog):
    path = compiled.kernel_file()
    path.parent.mkdir()
    path.write_bytes(b"no library")
    compiled.load()
    assert str(path) in caplog.text


def test_without_a_compiler_nothing_is_written(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises((OSError, ImportError), match=r"no-such-compiler|ninja"):
        compiled.build()
    assert not list(folder.iterdir())


def test_another_version_of_pytorch_needs_another_library(folder, monkeypatch):
    before = compiled.kernel_file()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert compiled.kernel_file() != before
