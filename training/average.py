"""Average the weights of several checkpoints into one ordinary checkpoint (section 6.1)."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_vaswani import VaswaniForConditionalGeneration


RECORD = "averaged_from.json"


def numbered_checkpoints(run: str) -> list[Path]:
    """The complete checkpoints of a run's folder, oldest first."""
    folders = [f for f in Path(run).glob("checkpoint-*") if f.name.removeprefix("checkpoint-").isdigit()]
    complete = [f for f in folders if (f / "trainer_state.json").is_file()]
    return sorted(complete, key=lambda f: int(f.name.removeprefix("checkpoint-")))


def average(checkpoints: list[str | Path], output: str) -> None:
    """Write the mean of the checkpoints' weights, with the tokenizer and settings of the last one.

    Args:
        checkpoints (`list[str | Path]`): Checkpoint folders, with the same configuration.
        output (`str`): Folder to write. It appears only when it is complete, and lists in `averaged_from.json` what
            went into it.

    Raises:
        ValueError: No checkpoint, or configurations that differ.
        FileExistsError: `output` is there already.
    """
    if not checkpoints:
        raise ValueError("No checkpoints to average.")
    if Path(output).exists():
        raise FileExistsError(f"{output} is there already.")
    sums: dict[str, torch.Tensor] = {}
    for folder in checkpoints:
        model = VaswaniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        config = model.config.to_diff_dict()
        if not sums:
            first_config = config
        if config != first_config:
            differing = sorted(k for k in config.keys() | first_config.keys() if config.get(k) != first_config.get(k))
            raise ValueError(f"{folder} differs from {checkpoints[0]} in {', '.join(differing)}.")
        for name, weight in model.named_parameters():  # a tied matrix comes once
            sums[name] = sums.get(name, 0) + weight.detach().double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(sums[name] / len(checkpoints))

    partial = Path(f"{output}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(checkpoints[-1]).save_pretrained(partial)
    record = {"method": "mean of the weights", "checkpoints": [str(folder) for folder in checkpoints]}
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.rename(output)


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani average`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani average", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", help="folder of a run, whose last checkpoints to average")
    which.add_argument("--checkpoints", nargs="+", help="checkpoint folders to average")
    parser.add_argument("--last", type=int, default=5, help="with --run: how many; the paper: 5, big 20 (%(default)s)")
    parser.add_argument("--output", required=True, help="checkpoint folder to write")
    args = parser.parse_args(argv)
    checkpoints = args.checkpoints
    if args.run:
        if args.last < 1:
            parser.error(f"--last must be at least 1, got {args.last}")
        checkpoints = numbered_checkpoints(args.run)[-args.last :]
        if len(checkpoints) < args.last:
            parser.error(f"--run {args.run}: asked for the last {args.last} checkpoints, found {len(checkpoints)}")
    average(checkpoints, args.output)
    print(f"{args.output}: mean of " + ", ".join(Path(folder).name for folder in checkpoints))


if __name__ == "__main__":
    main()
