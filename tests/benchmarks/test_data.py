import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.benchmarks import data as data_benchmark


def test_synthetic_pairs_have_the_lengths_of_wmt14(tmp_path):
    """Log-normal, and alike on both sides; the same for the same seed."""
    files = data_benchmark.write_pairs(tmp_path, 3000, seed=1)
    sides = [Path(file).read_text(encoding="utf-8").splitlines() for file in files]
    source, target = (np.array([len(line.split()) for line in lines]) for lines in sides)
    assert len(source) == len(target) == 3000
    assert 22 < source.mean() < 25  # 19 * exp(0.65**2 / 2) = 23.5 words, rounded down
    assert 17 <= np.median(source) <= 20
    assert np.corrcoef(source, target)[0, 1] > 0.9
    assert min(source.min(), target.min()) >= 1
    (tmp_path / "again").mkdir()
    again = data_benchmark.write_pairs(tmp_path / "again", 3000, seed=1)
    other = data_benchmark.write_pairs(tmp_path / "again", 2999, seed=2)
    assert Path(again[1]).read_text(encoding="utf-8").splitlines() == sides[1]
    assert Path(other[1]).read_text(encoding="utf-8").splitlines() != sides[1][:2999]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.slow
def test_memory_of_its_own_is_seen_while_it_is_there():
    """In a process of its own, to which nothing gives back memory meanwhile."""
    script = """
import os
import numpy as np
from training.benchmarks.data import Memory
memory = Memory(os.getpid())
memory.look()
before = memory.anonymous
block = np.ones(64 * 2**20, np.uint8)
memory.look()
print(memory.anonymous - before)
del block
memory.reset()
memory.look()
print(memory.anonymous - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    during, after = map(int, run.stdout.split())
    assert during == pytest.approx(64 * 2**20, rel=0.1)
    assert after < 8 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("mode", [["--plan-only"], ["--num-proc", "2", "--folder"]])
def test_the_data_benchmark_ends_with_its_figures(tmp_path, capfd, mode):
    folder = [str(tmp_path)] if mode[-1] == "--folder" else []
    data_benchmark.main(["--pairs", "1200", "--base", "300", "--tokens", "500", *mode, *folder])
    figures = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    stages = {"lengths", "bucketing", "epoch"}
    if folder:
        stages |= {"reading", "tokenising", "filtering", "second start"}
        assert figures["results"]["1200"]["stages"]["cache on disk"]["bytes"] > 1200 * 100
        assert not list(tmp_path.glob("cache-*"))
    result = figures["results"]["1200"]
    assert set(result["bytes_a_pair"]) == stages
    assert all(result["stages"][name]["bytes"] > 2**20 for name in stages)
    expected = (result["stages"]["epoch"]["bytes"] - figures["base"]["epoch"]["bytes"]) / 900
    assert result["bytes_a_pair"]["epoch"] == pytest.approx(expected, abs=0.1)
