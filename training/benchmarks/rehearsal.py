"""Rehearse the WMT14 recipes: start each of them on synthetic pairs, with the paper's vocabulary, model and budgets.

    python -m training.benchmarks.rehearsal
    python -m training.benchmarks.rehearsal --recipes wmt14_en_de_base --updates 1

Every recipe trains for a few updates as it stands, but on generated pairs in place of the Hub's. An update is put
together from smaller batches, as on one device. The pairs have the lengths of WMT14, 25 words in the mean, and random
words of which few are frequent. Reported for each recipe: the parameters, the tokens of the updates without padding,
the seconds of an update, the peak memory, and the operations of the whole run. The hours on 8 GPUs are an estimate
from these operations, at the assumed rate of `--gpu-tflops` and `--utilisation`. The last line is one JSON object.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import string
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import torch
import yaml
from transformers import TrainerCallback

from ..settings import TRAINING_KERNELS
from ..trainer.arguments import make_arguments
from ..trainer.command_line import load_recipe, parse_values
from ..trainer.run import make_trainer
from .memory import peak_memory
from .training import Counts, operations


RECIPES = ("wmt14_en_de_base", "wmt14_en_de_big", "wmt14_en_fr_base", "wmt14_en_fr_big")
GPUS = 8
WORDS, SPREAD = 25, 0.6  # mean number of words of a sentence, and standard deviation of its logarithm
LEXICON = 60_000  # words of a language


def sentence_pairs(count: int, seed: int) -> list[str]:
    """Tab-separated pairs of random words, whose frequency falls with their rank (Zipf's law)."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))) for _ in range(LEXICON)]
    weights = list(accumulate(1 / rank for rank in range(1, LEXICON + 1)))
    lines = []
    for _ in range(count):
        length = math.exp(rng.gauss(math.log(WORDS) - SPREAD**2 / 2, SPREAD))
        sides = [max(1, round(length * rng.uniform(0.9, 1.1))) for _ in range(2)]
        lines.append("\t".join(" ".join(rng.choices(words, cum_weights=weights, k=side)) for side in sides))
    return lines


def local_recipe(name: str, folder: Path) -> Path:
    """Copy a packaged recipe to `folder`, without its data set on the Hub and its processes."""
    recipe = load_recipe(name)
    for field in ("dataset_name", "dataset_config", "num_proc"):
        recipe.pop(field)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


class Stopwatch(TrainerCallback):
    """Seconds and tokens of every update."""

    def __init__(self):
        self.seconds: list[float] = []
        self.counts: list[Counts] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.counts.append(Counts())
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def rehearse(connection, recipe: str, pairs: str, updates: int, threads: int) -> None:
    """Train for some updates in a process of its own, and send what was measured."""
    os.environ.update(TRAINING_KERNELS)  # as `hf-vaswani train` does
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"train_files": pairs, "output_dir": f"{folder}/run", "eval_strategy": "no", "save_strategy": "no"}
        argv = ["--config", str(local_recipe(recipe, Path(folder))), *(f"--{k}={v}" for k, v in fixed.items())]
        full = make_arguments(parse_values(argv))[2]
        argv.append(f"--max_steps={updates}")
        trainer = make_trainer(*make_arguments(parse_values(argv)), None)
        watch, step = Stopwatch(), trainer.training_step

        def counted_step(model, inputs, *rest):
            watch.counts[-1].add(inputs)
            return step(model, inputs, *rest)

        trainer.training_step = counted_step
        trainer.add_callback(watch)
        trainer.train()
    connection.send(
        {
            "parameters": trainer.model.num_parameters(),
            "vocabulary": len(trainer.processing_class),
            "batches": trainer.args.gradient_accumulation_steps,
            "source_tokens": [count.source for count in watch.counts],
            "target_tokens": [count.target for count in watch.counts],
            "seconds_per_update": round(statistics.median(watch.seconds), 1),
            "peak_memory_mb": round(peak_memory(torch.device("cpu")) / 2**20),
            "updates_of_the_recipe": full.max_steps,
            "operations": full.max_steps
            * statistics.mean(operations(trainer.model.config, c.source, c.target) for c in watch.counts),
        }
    )


def hours(operations: float, tflops: float, utilisation: float) -> float:
    """Hours of `GPUS` devices for so many operations.

    >>> hours(8 * 3600 * 100e12 * 0.5, tflops=100, utilisation=0.5)
    1.0
    """
    return operations / (GPUS * tflops * 1e12 * utilisation) / 3600


def main(argv: list[str] | None = None) -> None:
    """`python -m training.benchmarks.rehearsal`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--updates", type=int, default=3, help="updates of each recipe (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20_000, help="generated pairs (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--gpu-tflops", type=float, default=312, help="peak of a GPU; default %(default)s: A100, bf16")
    parser.add_argument("--utilisation", type=float, default=0.3, help="assumed share of the peak (%(default)s)")
    args = parser.parse_args(argv)
    context, results = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder, "pairs.tsv")
        pairs.write_text("\n".join(sentence_pairs(args.pairs, seed=0)) + "\n", encoding="utf-8")
        for recipe in args.recipes:
            connection, sender = context.Pipe(duplex=False)
            process = context.Process(target=rehearse, args=(sender, recipe, str(pairs), args.updates, args.threads))
            process.start()
            sender.close()  # so that a process that fails ends the wait
            figures = connection.recv()
            process.join()
            figures["hours_on_8_gpus"] = round(hours(figures["operations"], args.gpu_tflops, args.utilisation), 2)
            results[recipe] = figures
            print(recipe, figures, flush=True)
    print(json.dumps({"gpu_tflops": args.gpu_tflops, "utilisation": args.utilisation, "results": results}))


if __name__ == "__main__":
    main()
