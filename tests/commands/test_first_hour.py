"""The first hour of a newcomer: a fresh clone in an empty environment, the guides' commands, and their outputs."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.guides import PYPROJECT, Block, fenced_blocks
from support.paths import ROOT


pytestmark = pytest.mark.slow


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a line of a shell, and return its output, or its standard error if the output is a file."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stderr if " > " in command else done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The caller's way to Python and its packages, and nothing else; the project's address leads here."""
    kept = ("LANG", "PATH", "PIP_", "SSL_", "REQUESTS_", "http", "https", "HTTP", "HTTPS", "no_proxy", "NO_PROXY")
    inherited = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    return inherited | {
        "HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_OFFLINE": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{ROOT}.insteadOf",
        "GIT_CONFIG_VALUE_0": PYPROJECT["project"]["urls"]["Repository"],
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory, environment) -> Path:
    """A clone in which the quick start of README.md has run, `make demo` too."""
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone can be cloned")
    folder = tmp_path_factory.mktemp("newcomer")
    [start] = [block for block in fenced_blocks("README.md") if "git clone" in block.text]
    run(start.text, folder, environment)
    clone = folder / Path(PYPROJECT["project"]["urls"]["Repository"]).name
    [demo] = [block for block in fenced_blocks("README.md") if block.text.strip() == "make demo"]
    run(demo.text, clone, environment)
    return clone


def consoles(guide: str) -> list[Block]:
    return [block for block in fenced_blocks(guide) if block.language == "console"]


CONSOLES = [block for guide in ("README.md", "training/README.md") for block in consoles(guide)]


@pytest.mark.parametrize("block", CONSOLES, ids=str)
def test_the_outputs_in_the_guides_are_what_one_sees(block, clone, environment):
    """Figures may differ a little, and so may the less probable translations after the best."""
    environment = environment | {"PATH": f"{clone / '.venv' / 'bin'}:{environment['PATH']}"}
    for part in block.text.removeprefix("$ ").split("\n$ "):
        command, _, shown = part.partition("\n")
        found = run(command, clone, environment)
        assert len(found.splitlines()) == len(shown.splitlines()) > 0
        for ours, theirs in list(zip(found.splitlines(), shown.splitlines()))[: 1 if "--n-best" in command else None]:
            assert figures(ours)[0] == figures(theirs)[0]
            assert figures(ours)[1] == pytest.approx(figures(theirs)[1], abs=1, rel=0.02)


def figures(line: str) -> tuple[str, list[float]]:
    """A line without its decimal numbers, and these."""
    pattern = r"-?\d+\.\d+(?!\.)\b"
    return re.sub(pattern + " *", "#", line), [float(figure) for figure in re.findall(pattern, line)]


def test_the_model_loads_in_python_as_the_readme_says(clone, environment):
    [block] = [
        block for block in fenced_blocks("README.md") if "demo/run/average" in block.text and "import" in block.text
    ]
    *_, last = block.text.splitlines()
    (clone / "example.py").write_text(block.text, encoding="utf-8")
    assert run(".venv/bin/python example.py", clone, environment).strip() == last.rpartition("# ")[2]
