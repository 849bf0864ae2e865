"""Extras that the targets of the Makefile install, by what `make` would run."""

import re
import shutil
import subprocess

import pytest

from support.paths import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", ["train,plots"]),
        ("test", ["train,plots", "train,plots,dev"]),
        ("lint", ["train,plots", "train,plots,dev"]),
    ],
)
def test_only_tests_install_the_developers_tools(tmp_path, target, extras):
    command = ["make", "--dry-run", f"VENV={tmp_path / 'new'}", target]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [step for step in steps if "pip install" in step and "echo" not in step]
    assert [match[1] for step in installs if (match := re.search(r"--editable '\.\[(.*)\]'", step))] == extras
    assert all("--constraint constraints.txt" in step for step in installs)
