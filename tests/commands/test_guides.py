"""Every block of every guide runs as it stands there, beside files with the names that it uses.

Each block has a folder of its own with small data and random models. A block or a command that nothing here knows how
to run is a failure. `test_first_hour.py` compares the outputs of the consoles, with the demo's trained model.
"""

import argparse
import contextlib
import gzip
import importlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from sacrebleu.dataset import DATASETS

from support.foreign_models import marian_model
from support.guides import PYPROJECT, Block, fenced_blocks
from support.hub_client import connected
from support.hub_server import Hub
from support.models import noisy_translator
from support.paths import ROOT
from training.ablation import rows
from training.cli import main
from training.inference import demo_page, workers
from training.publishing import figures
from training.trainer.arguments import parse_arguments
from training.trainer.command_line import load_recipe


TOKEN = "hf_secretOfUser"
OTHER_TOKEN = "hf_secretOfOther"
MODELS = ("M", "M1", "M2", "M3", "demo/run/average")
SMALL_MODEL = "model_cards/tatoeba_en_de"
OPTIONAL = {"curves": "matplotlib", "figures": "matplotlib"}

# What makes the README's trainings tiny; a command line wins over its recipe, and its last word over others.
STEPS = [
    *("--max_steps", "5", "--save_steps", "1", "--eval_steps", "1", "--warmup_steps", "2", "--save_total_limit", "6"),
    *("--source_tokens_per_update", "200", "--target_tokens_per_update", "200", "--tokens_per_device", "200"),
    *("--generation_num_beams", "1", "--generation_max_length", "8", "--disable_tqdm", "true", "--report_to", "none"),
]
TINY = {"d_model": 8, "d_ff": 8, "d_k": 4, "d_v": 4, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
TREE = "(S (NP (DT the) (NN man)) (VP (VBZ sleeps)))\n"
FROM_SCRATCH = ["--model_overrides", json.dumps(TINY), "--vocab_size", "300", "--num_proc", "1"]


GUIDES = [  # test_tour.py runs the blocks of hf_vaswani/README.md
    "README.md",
    "CONTRIBUTING.md",
    "model_cards/README.md",
    "training/README.md",
    "training/benchmarks/README.md",
    "training/recipes/README.md",
]
BLOCKS = [block for guide in GUIDES for block in fenced_blocks(guide)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory, tokenizer):
    """A Hub that has user/model and the MarianMT models that the guides name."""
    users = {TOKEN: "user", OTHER_TOKEN: "Helsinki-NLP"}
    with Hub(users) as hub, connected(hub, TOKEN, tmp_path_factory.mktemp("cache")):
        noisy_translator(tokenizer, max_extra_tokens=3).push_to_hub("user/model")
        tokenizer.push_to_hub("user/model")
        marian_model(vocab_size=len(tokenizer)).push_to_hub("Helsinki-NLP/opus-mt-en-de", token=OTHER_TOKEN)
        tokenizer.push_to_hub("Helsinki-NLP/opus-mt-en-de", token=OTHER_TOKEN)
        yield hub
    assert hub.failures == []


@pytest.fixture(scope="module")
def files(pairs, tokenizer, tmp_path_factory) -> Path:
    """A folder with everything that the README's commands read."""
    folder = tmp_path_factory.mktemp("files")
    for name in MODELS:
        noisy_translator(tokenizer, max_extra_tokens=3).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    sides = {"en": 0, "de": 1}
    few, many = pairs[:4], pairs[:60]
    shutil.copytree(ROOT / SMALL_MODEL, folder / SMALL_MODEL)
    columns = {f"{split}.{lang}": [pair[side] for pair in some] for lang, side in sides.items()
               for split, some in (("test", few), ("val", few), ("train", many))}  # fmt: skip
    columns |= {"mono.en": columns["test.en"], "out.de": columns["test.de"], "other.de": columns["test.de"][::-1]}
    columns |= {"begun.de": ["Heute", "", "Mein", ""]}
    columns |= {f"wmt14.en-de.{kind}": columns[f"test.{lang}"] for kind, lang in (("src", "en"), ("ref", "de"))}
    columns |= {
        f"{name}.tsv": ["\t".join(pair) for pair in some]
        for name, some in (("mine", many), ("train", many), ("val", few))
    }
    for name, lines in columns.items():
        (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
    (folder / "test.words").write_text("the man sleeps\n", encoding="utf-8")
    (folder / "test.trees").write_text(TREE, encoding="utf-8")
    (folder / "train.trees").write_text(TREE * 60, encoding="utf-8")
    train_run(folder)
    for split, count in (("train", 60), ("val", 4)):
        with gzip.open(folder / f"{split}.trees.gz", "wt", encoding="utf-8") as file:
            file.write(TREE * count)
    zipped = {"big.en.gz": "train.en"}
    zipped |= {f"lc_norm_tok/{split}.{lang}.gz": f"{split}.{lang}" for split in ("train", "val") for lang in sides}
    (folder / "lc_norm_tok").mkdir()
    for name, content in zipped.items():
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in columns[content])
    demo = folder / "demo"
    (demo / "data").mkdir()
    shutil.copytree(folder / "runs" / "mine", demo / "run", dirs_exist_ok=True)
    for lang in sides:
        shutil.copy(folder / f"test.{lang}", demo / "data" / f"test.{lang}")
    (demo / "data" / "test.align").write_text("0-0\n" * len(few), encoding="utf-8")
    shutil.copy(folder / "out.de", demo / "translations.de")
    # datasets takes a folder of that name for the data set of the Hub.
    wmt14 = folder / "wmt" / "wmt14"
    wmt14.mkdir(parents=True)
    for split, some in (("train", many), ("validation", few)):
        rows = [json.dumps({"translation": dict(zip(sides, pair))}) + "\n" for pair in some]
        (wmt14 / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    (wmt14 / "README.md").write_text(
        "---\nconfigs:\n- config_name: de-en\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: validation, path: validation.jsonl}\n---\n"
    )
    return folder


def train_run(folder: Path) -> None:
    """A finished run, runs/mine, and the average of its checkpoints."""
    words = [
        "--train_files",
        "mine.tsv",
        "--eval_files",
        "val.tsv",
        "--output_dir",
        "runs/mine",
        *STEPS,
        *FROM_SCRATCH,
    ]
    with contextlib.chdir(folder):
        assert main(["train", *words]) == 0
        assert main(["average", "--run", "runs/mine", "--output", "runs/mine/average"]) == 0


@pytest.fixture
def here(files, hub, tmp_path, monkeypatch) -> Path:
    """The working directory: a copy of the files. What would need a network or many processes has a stand-in."""
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(DATASETS["wmt14"], "_outdir", str(folder))
    monkeypatch.setattr(workers, "launch", in_this_process)
    for variable in ("MULTI30K", "CRAFT", "TATOEBA"):
        monkeypatch.setenv(variable, str(folder))
    named_rows = rows.named_rows
    monkeypatch.setattr(rows, "named_rows", lambda names: named_rows(names)[:1])  # test_ablate.py trains others
    monkeypatch.setattr(figures, "figures_of_the_paper", lambda: [figures.schedule_figure()])  # test_figures.py: all
    if importlib.util.find_spec("gradio") is None:
        page = SimpleNamespace(launch=lambda **options: print("served", options))
        monkeypatch.setattr(demo_page, "import_gradio", lambda: SimpleNamespace(__version__="6.0.0"))
        monkeypatch.setattr(demo_page, "make_page", lambda *_: page)
    else:
        blocks = importlib.import_module("gradio").Blocks
        monkeypatch.setattr(blocks, "launch", lambda self, **options: print("served", options))
    return folder


def in_this_process(processes: int, module: str, argv: list[str]) -> None:
    """In place of several processes, which test_processes.py starts."""
    assert module == "training.cli" and processes > 1
    place = argv.index("--processes")
    assert argv[place + 1] == str(processes)
    assert main([*argv[:place], *argv[place + 2 :]]) == 0


# How to run a command, given its words, in the working directory


def run_make(words: list[str], capsys) -> None:
    """The targets are there; what they do is for those who call them."""
    done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def run_pip(words: list[str], capsys) -> None:
    """It is this package that is installed, with extras that it has."""
    assert words[:2] == ["pip", "install"] and len(words) == 3
    wanted = Requirement(words[2])
    assert wanted.name == PYPROJECT["project"]["name"]
    assert wanted.extras <= set(PYPROJECT["project"]["optional-dependencies"])


def run_hf_vaswani(words: list[str], capsys) -> None:
    """It succeeds, and what it was told to write is there; or it prints something."""
    command, options = words[1], words[2:]
    if command == "train":
        output = Path(parse_arguments(options)[2].output_dir)
        if "--resume" not in options and output.is_dir():
            shutil.rmtree(output)
        fine_tunes = {"--init_from", "parsing_craft"} & set(options)
        options = [*options, *STEPS, *([] if fine_tunes else FROM_SCRATCH)]
    if command == "ablate":
        own, _, fields = " ".join(options).partition(" -- ")
        options = [*own.split(), "--", *fields.split(), *STEPS, *FROM_SCRATCH]
    capsys.readouterr()
    status, printed = main([command, *options]), capsys.readouterr()
    package = OPTIONAL.get(command)
    if package is not None and importlib.util.find_spec(package) is None:
        assert status == 1 and re.search(r"pip install 'hf-vaswani\[\w+\]'", printed.err)
        return
    assert status == 0, printed.err
    if command == "train":
        assert (output / "model.safetensors").is_file()
        assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 5
    elif command == "convert":
        assert "checked on" in printed.out and any(Path(options[1]).iterdir())
    elif places := [place for place, word in enumerate(options) if word in ("--output", "--write-space")]:
        output = Path(options[places[0] + 1])
        assert any(output.iterdir()) if output.is_dir() else output.stat().st_size > 1
    else:
        assert printed.out.strip()


def run_accelerate(words: list[str], capsys) -> None:
    """accelerate understands its part and the configuration; the rest runs here, on one device."""
    assert words[:2] == ["accelerate", "launch"]
    args = launch_command_parser().parse_args(words[2:])
    assert args.module
    config = load_config_from_file(str(ROOT / args.config_file))
    assert config.num_processes == 8
    module = importlib.import_module(args.training_script)
    options = [*args.training_script_args, *STEPS, *FROM_SCRATCH]
    module.main(options)
    assert (Path(parse_arguments(options)[2].output_dir) / "model.safetensors").is_file()


def run_python_module(words: list[str], capsys) -> None:
    """A benchmark knows these options. test_training.py, test_decoding.py and test_data.py run it."""
    assert words[:2] == ["python", "-m"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        importlib.import_module(words[2]).main(words[3:])


class Parsed(Exception):
    """Raised in place of the work."""


def parse_and_stop(self, argv) -> None:
    namespace, unknown = self.parse_known_args(argv)
    assert namespace and not unknown
    raise Parsed


def run_git(words: list[str], capsys) -> None:
    """It is this project that is cloned."""
    assert words == ["git", "clone", PYPROJECT["project"]["urls"]["Repository"]]


def run_cd(words: list[str], capsys) -> None:
    assert words[1:] == [Path(PYPROJECT["project"]["urls"]["Repository"]).name]


COMMANDS = {
    "cd": run_cd,
    "git": run_git,
    "python": run_python_module,
    "make": run_make,
    "pip": run_pip,
    "hf-vaswani": run_hf_vaswani,
    "accelerate": run_accelerate,
}


# How to run a block


def run_bash(block: Block, capsys) -> None:
    for recipe in [other for other in BLOCKS if other.language == "yaml" and other.guide == block.guide]:
        Path("my_recipe.yaml").write_text(recipe.text, encoding="utf-8")
    continued = block.text.replace("\\\n", " ")
    for number, line in enumerate(continued.splitlines(), start=block.line):
        run_line(line, f"{block.guide}:{number}", capsys)


def run_line(line: str, place: str, capsys) -> None:
    """Run a line of a shell: a command, `echo TEXT | COMMAND` or `COMMAND > FILE`."""
    words = shlex.split(line.partition(" > ")[0], comments=True)
    if words[:1] == ["echo"] and words[2] == "|":
        sys.stdin = io.TextIOWrapper(io.BytesIO(f"{words[1]}\n".encode()))
        words = words[3:]
    if not words:
        return
    if (name := Path(words[0]).name) not in COMMANDS:
        pytest.fail(f"{place}: nothing here knows how to run {line!r}")
    COMMANDS[name](words, capsys)


def run_console(block: Block, capsys) -> None:
    """Commands behind `$ `, each with its output. Here a random model runs them, and all outputs are shorter."""
    assert block.text.startswith("$ ")
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if line.startswith("$ "):
            run_line(line.removeprefix("$ "), f"{block.guide}:{number}", capsys)


def run_python(block: Block, capsys) -> None:
    """The lines keep their numbers, for a traceback."""
    exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / block.guide), "exec"), {})


def run_yaml(block: Block, capsys) -> None:
    """A recipe whose every line takes effect; the commands beside it train by it."""
    Path("my_recipe.yaml").write_text(block.text, encoding="utf-8")
    recipe = load_recipe("my_recipe.yaml")
    values = {
        name: value for group in parse_arguments(["--config", "my_recipe.yaml"]) for name, value in vars(group).items()
    }
    assert recipe.keys() <= values.keys()
    for name, value in recipe.items():
        plain = {key: float(each) for key, each in value.items()} if isinstance(value, dict) else value
        same = str(value).lower() == str(values[name]).lower()
        assert same or plain == values[name] or float(value) == values[name], name


def run_layout(block: Block, capsys) -> None:
    """Every file and folder in it is there."""
    folders, named = {-1: ROOT}, 0  # by the indentation of the line that names them
    for line in block.text.splitlines():
        first, indent = line.split()[0], len(line) - len(line.lstrip())
        folders = {column: folder for column, folder in folders.items() if column < indent}
        folder = folders[max(folders)]
        if first.endswith("/"):
            folder = folders[indent] = folder / first
        assert folder.is_dir(), line
        for name in re.findall(r"(?<![\w<>])[\w/*]+\.(?:py|yaml|md)\b", line):
            assert list(folder.glob(name)), f"{folder.relative_to(ROOT)}/{name}"
            named += 1
    assert named > 30


def run_bibtex(block: Block, capsys) -> None:
    """The paper of CITATION.cff."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    families = re.findall(r"(\w+), [A-Z{]", block.text[block.text.index("author") : block.text.index("booktitle")])
    assert len(families) == 8
    for family in families:
        assert f"family-names: {family}" in citation


LANGUAGES: dict[str, Callable] = {
    "bash": run_bash,
    "bibtex": run_bibtex,
    "console": run_console,
    "python": run_python,
    "yaml": run_yaml,
    "": run_layout,
}


def run_block(block: Block, capsys) -> None:
    if block.language not in LANGUAGES:
        pytest.fail(f"{block.guide}:{block.line}: nothing here knows how to run a block of {block.language!r}")
    LANGUAGES[block.language](block, capsys)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_blocks_run(block, here, capsys):
    run_block(block, capsys)


def test_what_the_text_says_to_install_has_these_extras(capsys):
    texts = [(ROOT / guide).read_text(encoding="utf-8") for guide in GUIDES]
    commands = [command for text in texts for command in re.findall(r"`(pip install [^`]+)`", text)]
    assert len(commands) >= 2
    for command in commands:
        run_pip(shlex.split(command), capsys)


def test_all_blocks_were_found():
    lines = [line for guide in GUIDES for line in (ROOT / guide).read_text(encoding="utf-8").splitlines()]
    fences = [line for line in lines if line.lstrip().startswith("```")]
    assert len(BLOCKS) == len(fences) / 2 > 20
    assert {block.language for block in BLOCKS} == set(LANGUAGES)


def test_links_to_files_lead_somewhere():
    """Also those to sections."""
    checked = 0
    for guide in [*GUIDES, "hf_vaswani/README.md"]:
        text = (ROOT / guide).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            file, _, section = target.partition("#")
            path = (ROOT / guide).parent / file if file else ROOT / guide
            assert path.exists(), f"{guide}: {target}"
            if section:
                headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert section in anchors, f"{guide}: {target}"
            checked += 1
    assert checked > 20


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_badges_are_true():
    project = PYPROJECT["project"]
    oldest = next(line for line in project["dependencies"] if line.startswith("transformers"))
    expected = [
        f"licence-{project['license'].replace('-', '_')}",
        f"python-{project['requires-python'].removeprefix('>=')}+",
        f"transformers-{re.search(r'>=([0-9.]+)', oldest).group(1)}+",
        "arXiv-1706.03762",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"img\.shields\.io/badge/(.+)-\w+\)\]", readme) == expected


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (Block("ruby", "puts 1\n", 7), pytest.fail.Exception, "README.md:7: nothing here knows how to run a block"),
        (Block("bash", "# no\nrm -rf demo\n", 7), pytest.fail.Exception, "README.md:8: nothing here knows"),
        (Block("bash", "hf-vaswani translate --model M --beam 4\n", 7), SystemExit, "2"),
        (Block("bash", "hf-vaswani translate --model M --input no.en\n", 7), AssertionError, "no.en: no such file"),
        (Block("bash", "make no-such-target\n", 7), AssertionError, "no-such-target"),
        (Block("bash", "pip install 'hf-vaswani[extras]'\n", 7), AssertionError, "extras"),
        (Block("python", "import hf_vaswani\nhf_vaswani.nothing\n", 7), AttributeError, "nothing"),
        (Block("", "training/\n  nothing.py\n", 7), AssertionError, "training/nothing.py"),
    ],
    ids=lambda value: str(value) if isinstance(value, Block) else "",
)
def test_a_wrong_block_fails(block, error, message, here, capsys):
    with pytest.raises(error, match=message):
        run_block(block, capsys)
