"""COMET, by the command `comet-score` of the package unbabel-comet.

The package goes into an environment of its own, as it needs transformers older than 5, which this project cannot use.
"""

import json
import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from .metrics import MetricScore, current_seed, ratio_interval
from .test_sets import Texts


DEFAULT_MODEL = "Unbabel/wmt22-comet-da"


def find_comet(program: str) -> str:
    """Path of the program `comet-score`.

    Args:
        program (`str`): Name, to be looked for where the shell would, or path.

    Raises:
        FileNotFoundError: There is no such program; the message says how to get it.
    """
    if (found := shutil.which(program)) is None:
        raise FileNotFoundError(
            f"COMET needs the program {program!r} of the package unbabel-comet, which is not there. The package needs "
            "transformers < 5 and so an environment of its own: python -m venv comet && comet/bin/pip install "
            "unbabel-comet; then pass --comet-program comet/bin/comet-score."
        )
    return found


def comet(texts: Texts, model: str = DEFAULT_MODEL, program: str = "comet-score", n_bootstrap: int = 0) -> MetricScore:
    """COMET of a system: the mean of what the model gives to its sentences, about 0 to 1.

    Args:
        texts (`Texts`): With translations and sources, not tokenised. Of the references, COMET gets the first.
        model (`str`): A COMET model's name on the Hub, or a checkpoint.
        program (`str`): As for `find_comet`.
        n_bootstrap (`int`): Resamples of the sentences for the interval; 0 for none.

    Raises:
        FileNotFoundError: There is no such program.
        OSError: It failed, and the message ends with its last words; or it wrote something else than a score for
            each sentence.
    """
    program = find_comet(program)
    with tempfile.TemporaryDirectory() as folder:
        sides = {"sources": texts.sources, "translations": texts.hypotheses, "references": texts.references[0]}
        command = [program, "--model", model, "--gpus", str(int(torch.cuda.is_available())), "--only_system"]
        for name, lines in sides.items():
            path = Path(folder) / name
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
            command += [f"--{name}", str(path)]
        output = Path(folder) / "scores.json"
        command += ["--to_json", str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode or not output.is_file():
            last = " ".join(done.stderr.split())[-500:]
            raise OSError(f"{program} ended with status {done.returncode}: {last or 'it wrote no scores'}")
        scores = _read_scores(program, output)
    if len(scores) != len(texts.hypotheses):
        raise OSError(f"{program} scored {len(scores)} sentences of {len(texts.hypotheses)}.")
    interval = ratio_interval(lambda mean: mean, scores, [1.0] * len(scores), n_bootstrap)
    signature = f"model:{model}" + (f"|bs:{n_bootstrap}|seed:{current_seed()}" if interval else "")
    note = "the first reference alone." if len(texts.references) > 1 else ""
    return MetricScore("COMET", sum(scores) / len(scores), signature, interval, {}, note, digits=4)


def _read_scores(program: str, output: Path) -> list[float]:
    """The scores of the sentences: of one file of translations, a list of objects."""
    try:
        [segments] = json.loads(output.read_text(encoding="utf-8")).values()
        found = [segment["COMET"] for segment in segments]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{program} wrote something else than JSON with a COMET of each sentence: {error!r}") from error
    for line, score in enumerate(found, start=1):
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise OSError(f"{program}: the COMET of sentence {line} is {str(score)[:40]}, where a number is expected.")
    return [float(score) for score in found]
