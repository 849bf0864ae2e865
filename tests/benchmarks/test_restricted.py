import json
import subprocess
import sys

import pytest
import torch

from training.benchmarks import restricted
from training.benchmarks.restricted import KINDS, SelfAttention


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_restricted_computes_what_masked_does_and_full_something_else(is_causal):
    states = torch.randn(1, 400, 512)
    full, masked, blocks = (SelfAttention(kind, 64, is_causal)(states) for kind in KINDS)
    torch.testing.assert_close(blocks, masked, atol=1e-5, rtol=0)
    assert not torch.allclose(full, masked, atol=1e-3)


def test_counts_are_those_of_table_1():
    assert restricted.counts(1000, 64, 512) == (512_000_000, 32_768_000)
    found = {kind: {"cpu_ms": 1234.5, "clock_ms": 1300.0, "memory_mb": 7.0} for kind in KINDS}
    row = restricted.table({1000: found}, 64, 512).splitlines()[-1]
    assert row.startswith("| 1,000 | 512.0 M | 32.8 M | 1,234.50 (1,300.00) | ") and row.endswith("| 7.0 |")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_every_way_is_measured():
    command = [sys.executable, "-m", "training.benchmarks.restricted", "--lengths", "16", "400", "--repeats", "1"]
    for more in ([], ["--training", "--side", "decoder"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=300)
        results = json.loads(done.stdout.splitlines()[-1])["results"]
        assert list(results) == ["16", "400"]
        for found in results.values():
            assert all(found[kind]["cpu_ms"] > 0 and found[kind]["memory_mb"] >= 0 for kind in KINDS)
