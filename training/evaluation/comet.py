"""COMET, computed by the command `comet-score` of the package unbabel-comet.

The package needs a separate environment: it requires transformers < 5, and this project requires transformers 5.
"""

import json
import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from .choices import COMET_MODEL
from .metrics import MetricScore, current_seed, ratio_interval
from .test_sets import Texts


def find_comet(program: str) -> str:
    """Path of the program `comet-score`.

    Args:
        program (`str`): Path, or name to look up in `PATH`.

    Raises:
        FileNotFoundError: No such program; the message says how to install it.
    """
    if (path := shutil.which(program)) is None:
        raise FileNotFoundError(
            f"COMET needs the program {program!r} of the package unbabel-comet, which was not found. It needs "
            "transformers < 5 and so an environment of its own: python -m venv comet && comet/bin/pip install "
            "unbabel-comet; then pass --comet-program comet/bin/comet-score."
        )
    return path


def comet(texts: Texts, model: str = COMET_MODEL, program: str = "comet-score", n_bootstrap: int = 0) -> MetricScore:
    """COMET of a system: the mean of its sentence scores, about 0 to 1.

    Args:
        texts (`Texts`): Detokenised translations, sources and references. COMET uses the first reference only.
        model (`str`): COMET model on the Hub, or a checkpoint.
        program (`str`): See `find_comet`.
        n_bootstrap (`int`): Resamples for the interval; 0 for none.

    Raises:
        FileNotFoundError: No such program.
        OSError: The program failed, and the message ends with its last output; or it did not write one score for each
            sentence.
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
        process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if process.returncode or not output.is_file():
            last = " ".join(process.stderr.split())[-500:]
            raise OSError(f"{program} ended with status {process.returncode}: {last or 'it wrote no scores'}")
        scores = _read_scores(program, output)
    if len(scores) != len(texts.hypotheses):
        raise OSError(f"{program} scored {len(scores)} sentences, expected {len(texts.hypotheses)}.")
    interval = ratio_interval(lambda mean: mean, scores, [1.0] * len(scores), n_bootstrap)
    signature = f"model:{model}" + (f"|bs:{n_bootstrap}|seed:{current_seed()}" if interval else "")
    note = "uses the first reference only." if len(texts.references) > 1 else ""
    return MetricScore("COMET", sum(scores) / len(scores), signature, interval, {}, note, digits=4)


def _read_scores(program: str, output: Path) -> list[float]:
    """Sentence scores from the program's output, a list of objects for one file of translations."""
    try:
        [segments] = json.loads(output.read_text(encoding="utf-8")).values()
        scores = [segment["COMET"] for segment in segments]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{program}: expected JSON with a COMET score for each sentence: {error!r}") from error
    for line, score in enumerate(scores, start=1):
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise OSError(f"{program}: COMET of sentence {line}: expected a finite number, found {str(score)[:40]}.")
    return [float(score) for score in scores]
