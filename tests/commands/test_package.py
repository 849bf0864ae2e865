"""The package as its users get it: built, installed where there is no checkout, and used there.

The environments have the wheel, and of the environment that runs the tests what `pip install` would bring with it:
links to these packages, and to no others.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PACKAGES = {"hf_vaswani": ROOT / "hf_vaswani", "hf_vaswani_training": ROOT / "training"}
UNREACHABLE = r"NewConnectionError|ConnectTimeout|Failed to establish|No matching distribution found for setuptools"
STEPS = [
    *("--max_steps", "3", "--save_steps", "3", "--eval_steps", "3", "--warmup_steps", "2", "--vocab_size", "400"),
    *("--source_tokens_per_update", "200", "--target_tokens_per_update", "200", "--tokens_per_device", "200"),
    *("--num_proc", "1", "--generation_num_beams", "1", "--generation_max_length", "8", "--average", "last"),
    *("--model_overrides", '{"d_model": 8, "d_ff": 8, "d_k": 4, "d_v": 4, "num_heads": 2}'),
]
USE = """
import importlib.util, sys
import torch
from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

absent = [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]
assert absent == sys.argv[2:], set(sys.argv[2:]) - set(absent)
model = VaswaniForConditionalGeneration(VaswaniConfig.from_table3("base", vocab_size=40, encoder_layers=1))
assert model(input_ids=torch.tensor([[5, 6, 2]]), labels=torch.tensor([[7, 2]])).loss.isfinite()
translator = pipeline("translation", model=sys.argv[1])
assert type(translator.model) is VaswaniForConditionalGeneration
print(translator("The child sleeps.")[0].keys())
"""


def files_of(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_folder_of_modules_is_a_package_that_is_installed(name):
    folders = {path.parent.relative_to(PACKAGES[name]) for path in PACKAGES[name].rglob("*.py")}
    packages = {".".join((name, *folder.parts)): folder for folder in folders}
    assert packages.keys() == {listed for listed in SETUPTOOLS["packages"] if listed.split(".")[0] == name}
    places = {listed: (PACKAGES[name] / folder).relative_to(ROOT).as_posix() for listed, folder in packages.items()}
    assert places.items() <= SETUPTOOLS["package-dir"].items()


@pytest.mark.parametrize("name", PACKAGES)
def test_every_file_that_is_no_module_is_installed(name):
    """But for the guides, which are for readers of the repository."""
    found = {file for file in files_of(PACKAGES[name]) if not file.endswith((".py", ".pyc", "README.md"))}
    installed = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        if package.split(".")[0] == name:
            folder = ROOT / SETUPTOOLS["package-dir"][package]
            found_here = (path for pattern in patterns for path in folder.glob(pattern))
            installed |= {path.relative_to(PACKAGES[name]).as_posix() for path in found_here}
    assert found == installed
    assert "py.typed" in installed


def test_pre_commit_runs_the_ruff_that_is_pinned():
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    [ruff] = [entry for entry in repositories if entry["repo"].endswith("/ruff-pre-commit")]
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert ruff["rev"] == f"v{pinned['ruff']}"


def run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """A command, without what the environment says about where modules lie."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True)


def succeed(*words: str | Path, cwd: Path, **variables: str) -> str:
    done = run(*words, cwd=cwd, **variables)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel, which is built from the source distribution, and that."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("build is not installed")
    source = tmp_path_factory.mktemp("source") / "checkout"
    # build/ and the like of the checkout must not find their way into the wheel, nor new ones into the checkout.
    names = ("hf_vaswani", "training", "tests", "model_cards", ".github")
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    output = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--outdir", output, source, cwd=source)
    if done.returncode != 0 and re.search(UNREACHABLE, done.stdout + done.stderr):
        pytest.skip("the package index, which build isolation gets setuptools from, cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel], [archive] = output.glob("*.whl"), output.glob("*.tar.gz")
    return wheel, archive


@pytest.mark.slow
def test_the_wheel_has_the_two_packages_whole_and_the_licence(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        license_text = next(wheel.read(name) for name in names if name.endswith("licenses/LICENSE"))
    expected = {f"{name}/{file}" for name, folder in PACKAGES.items() for file in files_of(folder)}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert license_text == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_source_distribution_has_the_tests_and_what_they_read(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("hf_vaswani", "training", "tests", "model_cards")
    expected = {f"{folder}/{file}" for folder in folders for file in files_of(ROOT / folder)}
    files = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile")
    expected |= {*files, "constraints.txt", "MANIFEST.in"}
    assert expected - names == set()
    assert [name for name in names if name.endswith(".pyc") or name.startswith((".venv", "build/", "dist/"))] == []


@pytest.mark.slow
def test_the_package_index_would_take_both(built):
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed")
    printed = succeed(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=ROOT)
    assert printed.count("PASSED") == 2


def distributions(requirements: list[str], extras: set[str]) -> dict[str, metadata.Distribution]:
    """Those of the environment that runs the tests that meet requirements, and theirs in turn."""
    found, todo = {}, [(Requirement(text), extras) for text in requirements]
    while todo:
        requirement, wanted = todo.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in {"", *wanted}):
            continue
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in found:
            continue
        found[name, *sorted(requirement.extras)] = distribution = metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), (requirement, distribution)
        todo += [(Requirement(text), requirement.extras) for text in distribution.requires or []]
    return {key[0]: distribution for key, distribution in found.items()}


def environment(folder: Path, wheel: Path, extras: set[str]) -> Path:
    """An environment into which the wheel has been installed. Returns its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    succeed(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    [own] = metadata.distributions(name="hf-vaswani", path=[str(site)])
    for distribution in distributions(own.requires, extras).values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists() and not top.endswith(".pth"):
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin"


@pytest.fixture(scope="module")
def trained(built, tmp_path_factory) -> tuple[Path, Path]:
    """An environment with the commands, and a folder in which they have generated data and trained."""
    programs = environment(tmp_path_factory.mktemp("commands"), built[0], {"train"})
    here = tmp_path_factory.mktemp("here")
    succeed(programs / "hf-vaswani", "demo-data", "demo/data", cwd=here)
    succeed(programs / "hf-vaswani", "train", "--config", "demo", *STEPS, cwd=here)
    return programs, here


@pytest.mark.slow
def test_it_is_the_installed_package_that_the_commands_run(built, trained):
    programs, here = trained
    code = (
        "import sys, json, hf_vaswani, hf_vaswani_training as t; print(json.dumps([hf_vaswani.__file__, t.__file__, "
    )
    code += "*sys.path])); import importlib.util as u; assert u.find_spec('training') is u.find_spec('tests') is None"
    places = json.loads(succeed(programs / "python", "-c", code, cwd=here))
    assert all(Path(place).is_relative_to(programs.parent) for place in places[:2])
    assert [place for place in places if Path(place or here).is_relative_to(ROOT)] == []
    version = built[0].name.split("-")[1]
    assert succeed(programs / "hf-vaswani", "--version", cwd=here) == f"hf-vaswani {version}\n"
    assert re.search(rf"^hf-vaswani +{re.escape(version)}$", succeed(programs / "hf-vaswani", "env", cwd=here), re.M)


@pytest.mark.slow
def test_the_installed_commands_train_translate_and_score(trained):
    programs, here = trained
    state = json.loads((here / "demo/run/trainer_state.json").read_text())
    assert state["global_step"] == 3 and (here / "demo/run/model.safetensors").is_file()
    test = {language: (here / f"demo/data/test.{language}").read_text().splitlines()[:20] for language in ("en", "de")}
    for language, lines in test.items():
        (here / f"few.{language}").write_text("".join(line + "\n" for line in lines))
    files = ("--input", "few.en", "--output", "out.de")
    succeed(programs / "hf-vaswani", "translate", "--model", "demo/run", *files, cwd=here)
    assert len((here / "out.de").read_text().splitlines()) == 20
    printed = succeed(programs / "hf-vaswani", "score", "--hypotheses", "out.de", "--references", "few.de", cwd=here)
    assert "BLEU" in printed and "version:" in printed


@pytest.mark.slow
def test_the_model_needs_torch_and_transformers_alone(built, trained, tmp_path):
    programs, here = environment(tmp_path / "model", built[0], set()), trained[1]
    listed = {Requirement(text).name for text in PYPROJECT["project"]["optional-dependencies"]["train"]}
    absent = ("accelerate", "datasets", "evaluate", "sacrebleu", "tensorboard", "matplotlib", "peft", "torchao")
    assert {"accelerate", "datasets", "evaluate", "sacrebleu", "tensorboard"} <= listed
    assert "translation_text" in succeed(programs / "python", "-c", USE, "demo/run", *absent, cwd=here)
    assert "transformers" in succeed(programs / "hf-vaswani", "env", cwd=here)
    refused = run(programs / "hf-vaswani", "train", "--config", "demo", cwd=here)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "'hf-vaswani[train]'" in refused.stderr
