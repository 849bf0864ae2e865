"""Broken files of every kind that is read: each is an error of this project that names the file, or is read."""

import contextlib
import gzip
import io
import json
import random
import re
import string
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from support.models import tiny_config
from training import cli
from training.ablation.table import read_results, write_table
from training.data.pairs import load_pairs
from training.data.readers import read_pairs
from training.evaluation.test_sets import read_texts
from training.publishing.curves import draw_curves
from training.publishing.records import find_run
from training.publishing.scores import read_report
from training.running import is_raised_by_project
from training.trainer.arguments import parse_arguments
from training.trainer.averaging import last_checkpoints
from training.trainer.checkpoints import read_progress, read_state
from training.trainer.command_line import load_recipe
from training.trainer.manifest import check_same_run


FILES = 2000
SEED = 0
WORDS = ["", " ", "\t", "dog", "Ünï", "日本", "\u2028", "\ufeff", "\0", "</s>", '"', "a" * 300, "👩‍👩‍👧", "\\ud83d"]
NUMBERS = ["0", "-1", "1e400", "NaN", "-Infinity", "9" * 5000, "1" * 19, "0.1", "1e-400", "007", "0x1f", "1_000"]


# What is written


class Maker:
    """Makes broken things of a seeded generator of random numbers."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def one_of(self, *choices):
        return self.random.choice(choices)

    def text(self) -> str:
        return "".join(self.random.choices(WORDS + list(string.printable), k=self.random.randrange(8)))

    def json(self, depth: int = 2) -> str:
        """JSON, or nearly."""
        kind = self.random.randrange(12)
        if kind == 0:
            deep = self.one_of(300, 900, 990, 5000, 100_000)
            return "[" * deep + "]" * deep
        if kind == 1:
            deep = self.one_of(300, 950, 5000)
            return '{"a":' * deep + "1" + "}" * deep
        if kind == 2:
            return self.one_of(*NUMBERS)
        if kind < 6 or depth == 0:
            return self.one_of("null", "true", "3", "2.5", '"text"', "[]", "{}", "", json.dumps(self.text()))
        if kind < 9:
            return "[" + ", ".join(self.json(depth - 1) for _ in range(self.random.randrange(4))) + "]"
        names = ["en", "de", "translation", "must_match", "may_change", "step", "global_step", "log_history", "a"]
        fields = (f'"{self.one_of(*names)}": {self.json(depth - 1)}' for _ in range(self.random.randrange(4)))
        return "{" + ", ".join(fields) + "}"

    def damaged(self, content: bytes) -> bytes:
        """Content of which a part is cut off, lost, turned or doubled."""
        for _ in range(self.one_of(0, 1, 1, 2, 5)):
            place, length = self.random.randrange(len(content) + 1), self.one_of(1, 1, 4, 50)
            new = self.one_of(
                b"",
                bytes(length),
                self.random.randbytes(length),
                b"\xff",
                b"\r\n",
                b"\n" * length,
                content[place : place + length] * 2,
            )
            content = self.one_of(content[:place], content[:place] + new + content[place + length :])
        return content

    def changed(self, record: dict) -> str:
        """A record in JSON, with a field or two that are lost or of another kind, at any depth."""
        text = json.dumps(record)
        values = list(re.finditer(r'(?<=: )("[^"]*"|-?[\d.]+|null|true|\[[^\[\]{}]*\]|\{[^{}]*\})', text))
        for match in sorted(
            self.random.sample(values, min(len(values), self.one_of(1, 1, 2))), key=lambda m: -m.start()
        ):
            text = text[: match.start()] + self.json(1) + text[match.end() :]
        names = list(re.finditer(r'"\w+": ', text))
        if names and self.random.random() < 0.3:
            match = self.random.choice(names)
            text = text[: match.start()] + f'"{self.text()!a:.5}": '.replace("'", "") + text[match.end() :]
        return text


def table(make: Maker) -> pyarrow.Table:
    """Columns of any type, of the right names or nearly."""
    kinds = [
        lambda: pyarrow.array(["one", "two", make.one_of(None, "three")]),
        lambda: pyarrow.array(["one", "two", "drei"], pyarrow.large_string()),
        lambda: pyarrow.array(["one", "one", "one"]).dictionary_encode(),
        lambda: pyarrow.array([1, 2, None]),
        lambda: pyarrow.array([b"\xff", b"a", None]),
        lambda: pyarrow.array([10**15, 2, 3], pyarrow.timestamp("s")),
        lambda: pyarrow.array([2**62, 2, 3], pyarrow.timestamp("ns")),
        lambda: pyarrow.array([["a"], [], None]),
        lambda: pyarrow.array([{"en": "one", "de": make.one_of("eins", None)}] * 3),
        lambda: pyarrow.array([{"en": "one", "de": 3}] * 3),
        lambda: pyarrow.array([{"en": "one"}, None, {}]),
        lambda: pyarrow.array([[("en", "one"), ("de", "eins")]] * 3, pyarrow.map_(pyarrow.string(), pyarrow.string())),
        lambda: pyarrow.nulls(3),
        # What says that it is text, and is none.
        lambda: pyarrow.Array.from_buffers(
            pyarrow.string(), 3, [None, *pyarrow.array([b"\xff\xfe", b"a", b"\xc3"], pyarrow.binary()).buffers()[1:]]
        ),
    ]
    names = make.one_of(["en", "de"], ["translation"], ["en", "de", "date"], ["en", "fr"], ["translation", "en"], [])
    columns = [make.random.choice(kinds)() for _ in names]
    if names == ["en", "de"] and make.random.random() < 0.5:
        columns = [make.random.choice([kinds[0], kinds[1], kinds[-1]])() for _ in names]
    return pyarrow.Table.from_arrays(columns, names)


def parquet(make: Maker) -> bytes:
    written = io.BytesIO()
    compression = make.one_of("none", "snappy", "gzip", "zstd")
    pyarrow.parquet.write_table(table(make), written, compression=compression)
    return make.damaged(written.getvalue())


def tsv(make: Maker) -> bytes:
    lines = (
        make.one_of("one\teins", "one", "a\tb\tc", make.text(), f"{make.text()}\t{make.text()}") for _ in range(4)
    )
    return make.damaged("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))


def jsonl(make: Maker) -> bytes:
    good = '{"translation": {"en": "one", "de": "eins"}}'
    sides = (f'{{"translation": {make.json()}}}', f'{{"en": {make.json(1)}, "de": {make.json(1)}}}')
    lines = [make.one_of(good, good, make.json(), *sides) for _ in range(make.random.randrange(5))]
    return make.damaged("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))


def lines(make: Maker) -> bytes:
    return make.damaged("".join(f"{make.text()}\n" for _ in range(make.random.randrange(6))).encode("utf-8"))


def zipped(content: bytes, make: Maker) -> bytes:
    return make.damaged(gzip.compress(content)) if make.random.random() < 0.8 else content


RECIPE = {
    "model": "base",
    "model_overrides": "{d_model: 16, d_ff: 16, num_heads: 2}",
    "train_files": "[a.en, a.de]",
    "max_steps": "3",
    "learning_rate": "5e-3",
    "eval_steps": "1000",
    "warmup_steps": "4",
    "seed": "1",
    "lr_scheduler_kwargs": "{}",
    "report_to": "none",
    "save_total_limit": "2",
    "label_names": "[labels]",
    "streaming": "true",
    "output_dir": "run",
    "lr_scheduler_type": "linear",
    "fsdp_config": "{}",
    "max_length_ratio": "2",
    "save_strategy": "steps",
}


def recipe(make: Maker) -> bytes:
    odd = [
        *NUMBERS,
        "[1]",
        "[[1], 2]",
        "{a: {b: c}}",
        "2001-99-99",
        "2001-01-01",
        "~",
        "",
        "!!binary aGk=",
        "*x",
        "&x 3",
    ]
    odd += ["[&x [1], *x]", "'", '"\\0"', "? a", "- a", "12:30:45", ".inf", ".nan", "yes", "Norway", '"--resume"']
    odd += ["[" * 3000, "{a: " * 3000, "{d_model: [1]}", "{d_model: .nan}", "{dropout: 2001-99-99}", "{1: 2}"]
    text = "".join(f"{name}: {value}\n" for name, value in make.random.sample(list(RECIPE.items()), 6))
    for name in make.random.sample(list(RECIPE), make.one_of(1, 2)):
        text += f"{make.one_of(name, name, name, name, make.text())}: {make.one_of(make.one_of(*odd), make.json())}\n"
    return make.one_of(make.damaged, bytes)(text.encode("utf-8", "surrogatepass"))


STATE = {
    **{"global_step": 3, "epoch": 1.0, "max_steps": 4, "save_steps": 1, "total_flos": 1e9},
    "log_history": [
        {"step": 1, "loss": 2.5, "learning_rate": 0.1, "target_tokens_per_second": 10.0},
        {"step": 3, "eval_bleu": 3.0, "eval_loss": 1.0, "eval_runtime": 2.0},
        {"step": 3, "train_runtime": 9.0, "train_steps_per_second": 0.3},
    ],
    **{"best_model_checkpoint": None, "stateful_callbacks": {}},
}
RUN = {
    "must_match": {"model.d_model": 16, "max_steps": 3, "warmup_steps": 4},
    "may_change": {"save_steps": 2, "devices": 1},
}
PROGRESS = {"total_loss": 1.5, "last_logged": 2, "saved_steps": [1, 2, 3], "processes": [{"loss": 0.5, "tokens": 3}]}
RESULT = {
    **{"row": "base", "seed": 1, "differs": {"d_model": 16}, "parameters": 10, "updates": 3, "source_tokens": 4},
    **{"target_tokens": 5, "seconds": 6.0, "evaluation_seconds": 7.0, "perplexity": 8.0, "bleu": 9.0},
    **{"metric": "BLEU", "signature": "s", "averaged": 2},
}
FIGURE = {
    **{"name": "sacreBLEU", "score": 20.0, "signature": "s", "note": "", "digits": 2},
    "interval": {"mean": 1.0, "half_width": 0.1, "samples": 10},
    "details": {"precisions": [1.0], "brevity_penalty": 1.0, "hypothesis_length": 3, "reference_length": 3},
}
COMPARISON = {
    **{"metric": "BLEU", "baseline": "b", "baseline_score": 1.0, "score": 2.0},
    **{"p_values": {"bootstrap": 0.1}, "signatures": {"bootstrap": "s"}},
}
REPORT = {"system": "x", "sentences": 3, "empty": 0, "figures": [FIGURE], "comparisons": [COMPARISON]}
AVERAGED = {"method": "mean", "checkpoints": ["checkpoint-1", "checkpoint-3"], "updates": 3}


def record(good: dict) -> Callable[[Maker], bytes]:
    def written(make: Maker) -> bytes:
        text = make.one_of(make.changed(good), make.changed(good), make.json())
        return make.one_of(make.damaged, bytes)(text.encode("utf-8", "surrogatepass"))

    return written


# What reads it


def pairs_of(path: Path) -> None:
    for _ in read_pairs([str(path)], ("en", "de")):
        pass


def parallel(path: Path) -> None:
    other = path.with_name("other.de")
    other.write_text("eins\nzwei\n", encoding="utf-8")
    for _ in read_pairs([str(path), str(other)], ("en", "de")):
        pass


def data_set(path: Path) -> None:
    load_pairs([str(path)], "en", "de", drop_empty=True)


def scored(path: Path) -> None:
    other = path.with_name("reference")
    other.write_text("eins\nzwei\n", encoding="utf-8")
    read_texts(str(path), [str(other)], None, [])


def checkpoint(path: Path) -> Path:
    folder = path.parent / "checkpoint-3"
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)
    if path.name != "trainer_state.json":
        (folder / "trainer_state.json").write_text(json.dumps(STATE), encoding="utf-8")
    return folder


def result(path: Path) -> None:
    run = path.parent / "base" / "seed-1"
    run.mkdir(parents=True)
    path.rename(run / path.name)
    read_results(path.parent)
    write_table(path.parent)


def state(path: Path) -> None:
    read_state(path.parent)
    draw_curves(str(path.parent), str(path.with_name("curves.png")))


def published(path: Path) -> None:

    found = find_run(checkpoint(path), tiny_config())
    if found.state is not None:
        from training.trainer.cost import cost

        cost(found.state, 1000, 1)


def command(*words: str) -> Callable[[Path], None]:
    """The command line, which turns an error into one line, and lets what is no error of ours through."""

    def called(path: Path) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
            status = cli.main([word.format(path=path, folder=path.parent) for word in words])
        if status:
            raise OSError(printed.getvalue().removesuffix("\n"))

    return called


# A recipe that is one comes to the data, which are not there.
MISSING = ["--train_files", "{path}.tsv", "--output_dir", "{folder}/run", "--streaming", "false"]
TRAIN = command("train", "--config", "{path}", *MISSING)
KINDS: list[tuple[str, Callable[[Maker], bytes], Callable[[Path], None], int]] = [
    ("pairs.tsv", tsv, pairs_of, 6),
    ("pairs.tsv.gz", lambda make: zipped(tsv(make), make), pairs_of, 6),
    ("pairs.jsonl", jsonl, pairs_of, 12),
    ("pairs.jsonl.gz", lambda make: zipped(jsonl(make), make), pairs_of, 4),
    ("pairs.parquet", parquet, pairs_of, 14),
    ("text.en", lines, parallel, 4),
    ("text.en.gz", lambda make: zipped(lines(make), make), parallel, 4),
    ("pairs.jsonl", jsonl, data_set, 1),
    ("pairs.parquet", parquet, data_set, 1),
    ("hypotheses", lines, scored, 3),
    ("recipe.yaml", recipe, lambda path: load_recipe(str(path)), 4),
    ("recipe.yaml", recipe, lambda path: parse_arguments(["--config", str(path)]), 14),
    ("trainer_state.json", record(STATE), state, 4),
    ("trainer_state.json", record(STATE), published, 4),
    ("run.json", record(RUN), published, 4),
    ("averaged_from.json", record(AVERAGED), published, 4),
    ("progress.json", record(PROGRESS), lambda path: read_progress(checkpoint(path)), 3),
    ("progress.json", record(PROGRESS), lambda path: last_checkpoints(str(checkpoint(path).parent), 1), 1),
    ("run.json", record(RUN), lambda path: check_same_run(RUN, str(path.parent)), 2),
    ("result.json", record(RESULT), result, 4),
    ("scores.json", record(REPORT), lambda path: read_report(str(path)), 6),
    ("recipe.yaml", recipe, TRAIN, 2),
    ("hypotheses", lines, command("score", "--hypotheses", "{path}", "--references", "{path}"), 1),
    ("trainer_state.json", record(STATE), command("curves", "--run", "{folder}", "--output", "{folder}/x.png"), 1),
]


def raised_by_us(error: Exception) -> bool:
    return isinstance(error, OSError) or (isinstance(error, ValueError) and is_raised_by_project(error))


@pytest.mark.slow
def test_every_broken_file_is_read_or_an_error_that_names_it(tmp_path, monkeypatch):
    """One line, and nothing but `ValueError` raised here and `OSError`, which `cli.main` prints as one."""
    monkeypatch.chdir(tmp_path)
    make, ends, wrong = Maker(SEED), Counter(), []
    weights = [weight for *_, weight in KINDS]
    for number in range(FILES):
        [(name, write, read, _)] = make.random.choices(KINDS, weights)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / name
        content = write(make)
        path.write_bytes(content)
        try:
            read(path)
            ends["read"] += 1
        except Exception as error:  # whatever it is, it is looked at
            ends["refused"] += 1
            message = str(error)
            if not raised_by_us(error) or name not in message or "\n" in message or len(message) > 2000:
                wrong.append(f"{number} {name}: {type(error).__name__}: {message:.300} {content[:100]!r}")
    assert wrong == [], "\n".join(wrong)
    assert ends["read"] > FILES / 20 and ends["refused"] > FILES / 2, ends
