"""Small training runs."""

import os
import subprocess
import sys

import torch
from datasets import Dataset

from hf_vaswani import VaswaniForConditionalGeneration
from support.models import tiny_config
from support.paths import ROOT, TESTS
from training.cli import main
from training.data.encoding import tokenize
from training.trainer.arguments import VaswaniTrainingArguments
from training.trainer.trainer import VaswaniTrainer


SMALL = [
    *("--model_overrides", '{"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}'),
    *("--vocab_size", "300", "--warmup_steps", "4", "--eval_strategy", "steps", "--eval_steps", "4"),
    *("--source_tokens_per_update", "1000", "--target_tokens_per_update", "1000", "--tokens_per_device", "500"),
    *("--save_steps", "2", "--logging_steps", "1", "--generation_num_beams", "1", "--generation_max_length", "12"),
    *("--disable_tqdm", "true"),
]


def train_argv(data, output, *more: str) -> list[str]:
    files = ["--train_files", *data["train"], "--eval_files", *data["val"]]
    return ["train", *files, "--output_dir", str(output), *SMALL, *more]


def train_when_told(words: list[str], at_work, go_on) -> None:
    """Train, but wait before the first update."""
    step = VaswaniTrainer.training_step

    def training_step(self, *args, **kwargs):
        at_work.set()
        go_on.wait()
        return step(self, *args, **kwargs)

    VaswaniTrainer.training_step = training_step
    sys.exit(main(words))


def make_trainer(folder, tokenizer, pairs, model=None, **overrides) -> VaswaniTrainer:
    arguments = {
        "output_dir": str(folder),
        "source_tokens_per_update": 400,
        "target_tokens_per_update": 400,
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "max_steps": 6,
        "eval_strategy": "no",
        "metric_for_best_model": None,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **overrides,
    }
    columns = {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}
    dataset = tokenize(Dataset.from_dict(columns), tokenizer)
    torch.manual_seed(5)
    model = model or VaswaniForConditionalGeneration(tiny_config(vocab_size=len(tokenizer), dropout=0.1))
    return VaswaniTrainer(
        model,
        VaswaniTrainingArguments(**arguments),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(20)),
        processing_class=tokenizer,
    )


def launch_two(command: list[str]) -> subprocess.CompletedProcess:
    """Run a module or script in two processes on the CPU, under `accelerate launch`, whose `--cpu` starts only one."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, *launch, *command], cwd=ROOT, capture_output=True, text=True, env=environment
    )
