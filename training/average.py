"""Average the weights of several checkpoints into one ordinary checkpoint (section 6.1)."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniForConditionalGeneration

from .checkpoints import checkpoint_name, complete_checkpoints, naming_what_failed, regular_steps, sync


RECORD = "averaged_from.json"


def last_checkpoints(run: str, count: int) -> list[Path]:
    """The last checkpoints that a run wrote in its own time, oldest first: not one that an interruption wrote in
    between, nor one that was kept for being the best, in the place of one that is gone.

    Raises:
        ValueError: There are not so many.
    """
    complete = complete_checkpoints(run)
    steps = regular_steps(complete[-1])[-count:] if complete else []
    if len(steps) < count:
        raise ValueError(f"{run}: asked for the last {count} checkpoints, and it has written {len(steps)}.")
    checkpoints = [Path(run) / checkpoint_name(step) for step in steps]
    if missing := [folder.name for folder in checkpoints if folder not in complete]:
        raise ValueError(
            f"{run}: of the last {count} checkpoints, these are gone: {', '.join(missing)}. "
            "Average fewer, or name others with --checkpoints."
        )
    return checkpoints


def average(checkpoints: list[str | Path], output: str, notes: dict | None = None, replace: bool = False) -> None:
    """Write the mean of the checkpoints' weights, with the tokenizer and settings of the last one.

    Args:
        checkpoints (`list[str | Path]`): Checkpoint folders, with the same configuration.
        output (`str`): Folder to write. It appears only when it is complete, and lists in `averaged_from.json` what
            went into it.
        notes (`dict`, *optional*): To be added there.
        replace (`bool`): Whether an average that is there already gives way.

    Raises:
        ValueError: No checkpoints, adapters, or configurations that differ.
        FileExistsError: `output` is there already.
    """
    if not checkpoints:
        raise ValueError("No checkpoints to average.")
    check_output(Path(output), replace)
    sums: dict[str, torch.Tensor] = {}
    for folder in checkpoints:
        if (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(f"{folder} holds an adapter, not a model's weights; average the merged models.")
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

    record = {"method": "mean of the weights", "checkpoints": [str(folder) for folder in checkpoints], **(notes or {})}
    write_checkpoint(model, AutoTokenizer.from_pretrained(checkpoints[-1]), Path(output), record, replace)


def check_output(output: Path, replace: bool) -> None:
    """Raises FileExistsError where there is something that may not be replaced: only an average may."""
    if output.exists() and not (replace and (output / RECORD).is_file()):
        raise FileExistsError(f"{output} is there already.")


def write_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path, record: dict, replace: bool = False
) -> None:
    """Writes an ordinary checkpoint folder, with the record of what was averaged; it appears when it is complete.

    Args:
        model (`PreTrainedModel`): With the averaged weights.
        tokenizer (`PreTrainedTokenizerBase`): To go with it.
        output (`Path`): Folder to write.
        record (`dict`): For `averaged_from.json`.
        replace (`bool`): Whether an average that is there already gives way.

    Raises:
        FileExistsError: `output` is there already.
        OSError: It cannot be written.
    """
    check_output(output, replace)
    partial, earlier = (output.with_name(f"{output.name}.{name}") for name in ("partial", "earlier"))
    for leftover in (partial, earlier):
        shutil.rmtree(leftover, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    what = f"{output.name} could not be written"
    with naming_what_failed(output.parent, what, lambda: shutil.rmtree(partial, ignore_errors=True)):
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        sync(partial)
    if output.exists():
        output.rename(earlier)
    partial.rename(output)
    shutil.rmtree(earlier, ignore_errors=True)


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
        checkpoints = last_checkpoints(args.run, args.last)
    average(checkpoints, args.output)
    print(f"{args.output}: mean of " + ", ".join(Path(folder).name for folder in checkpoints))


if __name__ == "__main__":
    main()
