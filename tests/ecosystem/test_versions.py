"""The versions of torch and transformers that the package says it works with, here and in a checkpoint's own code.

OTHER_PYTHON names the Python of an environment with another version of transformers; `make test-oldest` sets it.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import hf_vaswani
from hf_vaswani.versions_vaswani import OLDEST, check_version
from support.models import tiny_model
from support.paths import ROOT, SUPPORT, TESTS


PACKAGE = Path(hf_vaswani.__file__).parent
CARRIED = [f"carried.{path.stem}" for path in (PACKAGE / "configuration_vaswani.py", PACKAGE / "modeling_vaswani.py")]


@pytest.mark.parametrize("found", ["4.57.6", "5.17.0", "5.9.0", "5.17.0.dev0"])
def test_an_older_version_is_refused(found):
    with pytest.raises(ImportError, match=rf"transformers 5\.18 or newer, found {re.escape(found)}"):
        check_version("transformers", found, "5.18")


@pytest.mark.parametrize("found", ["5.18.0", "5.18.0.dev0", "5.23.0", "5.100", "6.0.0rc1", "5.18.1+local"])
def test_the_oldest_version_and_newer_ones_are_not(found):
    check_version("transformers", found, "5.18")


@pytest.mark.parametrize("module", ["hf_vaswani", *CARRIED])
@pytest.mark.parametrize(
    ("torch_version", "transformers_version", "facts"),
    [("2.13.0", "5.17.0", ("transformers 5.18", "found 5.17.0")), ("2.5.1+cpu", "5.18.0", ("torch 2.6", "2.5.1+cpu"))],
)
def test_an_older_version_is_named_before_anything_that_it_lacks(
    module, torch_version, transformers_version, facts, tmp_path
):
    """Here they lack everything but their version, and nothing else is installed."""
    for name, version in (("torch", torch_version), ("transformers", transformers_version)):
        (tmp_path / f"{name}.py").write_text(f'__version__ = "{version}"\n')
    for name in ("hf_vaswani", "carried"):
        shutil.copytree(PACKAGE, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "carried" / "__init__.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and all(fact in last for fact in facts), done.stderr


LOADER = """
import sys

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, pipeline

from support.version_stranger import Hidden

sys.meta_path.insert(0, Hidden())
sys.modules["transformers"].__version__ = "5.17.0"
folder = sys.argv[1]
attempts = {
    "AutoConfig": lambda: AutoConfig.from_pretrained(folder, trust_remote_code=True),
    "AutoModel": lambda: AutoModel.from_pretrained(folder, trust_remote_code=True),
    "AutoModelForSeq2SeqLM": lambda: AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True),
    "pipeline": lambda: pipeline("translation", model=folder, trust_remote_code=True),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except ImportError as error:
        print(name, error, sep=": ")
"""


@pytest.mark.slow
def test_a_checkpoint_names_an_older_version_wherever_it_is_loaded(tmp_path):
    tiny_model().save_pretrained(tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "checkpoint")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "AutoConfig",
        "AutoModel",
        "AutoModelForSeq2SeqLM",
        "pipeline",
    ], done.stderr
    assert all("needs transformers 5.18 or newer, found 5.17.0" in line for line in lines)


def test_the_package_the_oldest_environment_and_the_pins_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {needed.name: needed.specifier for needed in map(Requirement, project["dependencies"])}
    assert {name: str(specifier) for name, specifier in needed.items()} == {
        "torch": f">={OLDEST['torch']}",
        "transformers": f"<6,>={OLDEST['transformers']}",
    }
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert all(pins[name] in specifier for name, specifier in needed.items())
    card = (ROOT / "training" / "publishing" / "model_card.md").read_text(encoding="utf-8")
    assert f"`transformers` ({OLDEST['transformers']} or newer)" in card
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"transformers==(\d+\.\d+)\.\d+/", makefile) == [OLDEST["transformers"]]


def run(python: str, task: str, folder: Path) -> dict:
    """Report of version_stranger.py under that Python, offline."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_HOME": str(folder / f"home of {task}"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    isolated = ["-I"] if task == "read" else []
    script = SUPPORT / "version_stranger.py"
    done = subprocess.run(
        [python, *isolated, script, task, folder / "checkpoint", folder / f"{task}.pt"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / f"{task}.pt")


def assert_same(theirs, ours, name: str) -> None:
    assert type(theirs) is type(ours), name
    assert torch.equal(theirs, ours) if isinstance(ours, torch.Tensor) else theirs == ours, name


@pytest.mark.slow
@pytest.mark.parametrize("written_by", ["this", "the other"])
def test_a_checkpoint_of_one_version_gives_the_same_results_under_another(written_by, tmp_path):
    """To the bit, in a process that has only the code that the checkpoint carries."""
    other = os.environ.get("OTHER_PYTHON")
    if not other:
        pytest.skip("OTHER_PYTHON names no environment with another version of transformers; make test-oldest does")
    writer, reader = (sys.executable, other) if written_by == "this" else (other, sys.executable)
    written, read = run(writer, "write", tmp_path), run(reader, "read", tmp_path)
    assert written["version"] != read["version"]
    assert written["module"] == "hf_vaswani.modeling_vaswani"
    assert read["module"].startswith("transformers_modules.")
    assert read["config"] == written["config"] and read["config"]["model_type"] == "vaswani"
    assert read["seen"].keys() == written["seen"].keys()
    for name, ours in written["seen"].items():
        assert_same(read["seen"][name], ours, name)
    assert all(line["translation_text"] for line in written["seen"]["translations"])
    assert len(torch.unique(written["seen"]["n-best"], dim=0)) > 3
