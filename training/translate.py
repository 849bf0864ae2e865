"""Translate raw text with a checkpoint, line by line and in order, from a file or standard input to a file or
standard output.

Several processes, each on its own device, share the work with --processes, torchrun or `accelerate launch`.
"""

import argparse
import logging
import sys
from pathlib import Path

from .data.readers import check_file, is_interactive
from .files import check_output, is_stream, partial_files
from .inference.choices import ENGINES, FORMATS, MAX_SOURCE_TOKENS
from .options import OptionGroup, Parser, above_zero, add_dtype, add_trust, finite, positive, share
from .running import naming_resumption, run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani translate`."""
    parser = Parser(prog="hf-vaswani translate", description=__doc__)
    _add_files(parser.add_argument_group("input and output"))
    _add_search(parser.add_argument_group("search"))
    _add_sampling(parser.add_argument_group("sampling"))
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--batch-tokens", type=positive, default=1024, help="source tokens per batch (default: %(default)s)"
    )
    speed.add_argument(
        "--window",
        type=positive,
        help="number of lines that are sorted by length and translated together; their translations are written at "
        "once (default: 10000, or 1 for a terminal)",
    )
    speed.add_argument(
        "--processes",
        type=positive,
        default=1,
        help="number of processes, each on its own accelerator, or all on the CPU if there is none (default: "
        "%(default)s)",
    )
    speed.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="torch, or CTranslate2 with the same settings and scores; the model is converted once, into a cache in "
        "HF_HOME (default: %(default)s)",
    )
    add_dtype(speed)
    return parser


def _add_files(group: OptionGroup) -> None:
    add = group.add_argument
    add("--model", required=True, nargs="+", help="checkpoint folder or Hub repository; several form an ensemble")
    add("--input", default="-", help="text file with one sentence per line, or .trees file, whose words are parsed; "
        "plain or .gz (default: standard input)")  # fmt: skip
    add("--output", help="text file to write, compressed if the name ends in .gz; a FIFO or a device, such as "
        "/dev/null, is written to directly (default: standard output)")  # fmt: skip
    add("--resume", action="store_true", help="resume an interrupted run that wrote to the same --output")
    add("--format", choices=FORMATS, help="output format: text has the best translation on each line, nbest is the "
        "n-best list of Moses, jsonl has one JSON object per line with scores and the log probability of every token, "
        "tree has the bracketed tree of a parser, or an n-best list of trees with --n-best; words are separated by "
        "spaces (default: text, or nbest with --n-best)")  # fmt: skip
    add("--max-source-tokens", type=positive, help="maximum number of tokens in a line; --long-lines handles longer "
        f"lines (default: the model's limit, or {MAX_SOURCE_TOKENS})")  # fmt: skip
    add("--long-lines", choices=("split", "error"), help="split lines that exceed --max-source-tokens into pieces "
        "that are translated separately, or stop with an error (default: split; always error with "
        "--format tree)")  # fmt: skip
    add("--skip-bad-lines", action="store_true", help="leave the translation of a line empty that is too long, or "
        "whose prefix is, and report the lines at the end (default: stop with an error)")  # fmt: skip
    add_trust(group)


def _add_search(group: OptionGroup) -> None:
    add = group.add_argument
    add("--num-beams", type=positive, help="beam size (default: the checkpoint's)")
    add("--length-penalty", type=finite, help="length penalty α, 0.6 in the paper (default: the checkpoint's)")
    add("--max-extra-tokens", type=positive, help="number of tokens by which a translation may exceed its source, 50 "
        "in the paper and 300 for its parser (default: the checkpoint's)")  # fmt: skip
    add("--n-best", type=positive, help="number of translations per sentence (default: 1)")
    add("--target-prefix", help="text file parallel to --input with the words that each translation must begin with")
    add("--unconstrained", action="store_true", help="let --format tree search among all outputs, and mend those that "
        "are no trees (default: search among trees with one tag per word)")  # fmt: skip
    add("--tag-lexicon", nargs="+", metavar="TREES", help=".trees files, such as the training data: let --format tree "
        "give each word only tags that it has there, or that rare words have if it is rare; needs beams")  # fmt: skip


def _add_sampling(group: OptionGroup) -> None:
    add = group.add_argument
    add("--sample", action="store_true", help="sample translations at random instead of searching for the likeliest")
    add("--temperature", type=above_zero, help="temperature of --sample (default: 1)")
    add("--top-k", type=positive, help="restrict --sample to this number of most likely tokens (default: all tokens)")
    add("--top-p", type=share, help="restrict --sample to the most likely tokens whose probabilities add up to this "
        "number (default: all tokens)")  # fmt: skip
    add("--seed", type=int, help="random seed of --sample (default: 0)")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments and check their combination. Exits with status 2 and a message if they conflict."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.input != "-":
        check_file(args.input, stream=True)
    if args.target_prefix not in (None, "-"):
        check_file(args.target_prefix)
    if args.output in ("-", "/dev/stdout"):
        args.output = None
    if args.output is not None:
        check_output(args.output, [args.input, args.target_prefix, *args.model], streams=True)
    if args.resume and (args.output is None or is_stream(args.output) or not Path(args.input).is_file()):
        parser.error("--resume needs an --input file and an --output file")
    if args.output is not None and not is_stream(args.output):
        for file in partial_files(args.output):
            check_output(file, [args.input, args.target_prefix, *args.model])
    if args.target_prefix == "-":
        parser.error("--target-prefix must be a file")
    if args.processes > 1 and not Path(args.input).is_file():
        parser.error("--processes needs an --input file, because every process reads it")
    sampling = [name for name in ("temperature", "top_k", "top_p", "seed") if getattr(args, name) is not None]
    if sampling and not args.sample:
        parser.error(f"--{sampling[0].replace('_', '-')} needs --sample")
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    if args.sample and (args.num_beams or 1) > 1:
        parser.error(f"--sample has no beams, got --num-beams {args.num_beams}")
    if args.engine != "torch" and args.sample:
        parser.error(f"--sample needs --engine torch, got {args.engine}")
    if args.engine != "torch" and len(args.model) > 1:
        parser.error(f"an ensemble needs --engine torch, got {args.engine} and {len(args.model)} models")
    _check_trees(parser, args)
    args.sampling = {name: getattr(args, name) for name in sampling} if args.sample else None
    if args.format == "text" and (args.n_best or 1) > 1:
        parser.error("--n-best needs --format nbest or jsonl: text has one translation per line")
    args.format = args.format or ("text" if args.n_best is None else "nbest")
    args.n_best = args.n_best or 1
    args.window = args.window or (1 if is_interactive(args.input) else 10_000)
    options = ("num_beams", "length_penalty", "max_extra_tokens")
    args.options = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    return args


def _check_trees(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the options that `--format tree` excludes or that only it has, and set the default of `--long-lines`."""
    if args.format != "tree":
        for name in ("unconstrained", "tag_lexicon"):
            if getattr(args, name):
                parser.error(f"--{name.replace('_', '-')} needs --format tree")
        args.long_lines = args.long_lines or "split"
        return
    if args.long_lines == "split":
        parser.error("--format tree has one tree per line, got --long-lines split")
    args.long_lines = "error"
    if args.tag_lexicon and args.unconstrained:
        parser.error("--tag-lexicon restricts the search, which --unconstrained does not")
    for file in args.tag_lexicon or []:
        check_file(file)
    if args.target_prefix is not None:
        parser.error(f"--format tree takes no prefixes, got --target-prefix {args.target_prefix}")
    if args.engine != "torch" and not args.unconstrained:
        parser.error(f"--format tree needs --unconstrained with --engine {args.engine}, which has no constraints")


def how_to_continue(output: str | None) -> str:
    """Sentence that names `--resume`, if there is a partial output to resume."""
    if output is None or not all(file.is_file() for file in partial_files(output)):
        return ""
    return "The same command with --resume continues."


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani translate`."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)

    import torch
    from torch.distributed import is_torchelastic_launched
    from torch.distributed.elastic.multiprocessing import SignalException

    from .inference.file_translation import load_search, translate_file
    from .inference.workers import launch

    if args.engine == "ctranslate2":
        from .conversion.ctranslate2_engine import load_search
    if args.processes > 1 and not is_torchelastic_launched():
        devices = torch.accelerator.device_count() if args.dtype != "int8" else 0
        if 0 < devices < args.processes:
            raise ValueError(f"--processes {args.processes}: expected as many accelerators, found {devices}.")
        try:
            launch(args.processes, f"{__package__}.cli", ["translate", *argv])
        except SignalException as stop:  # the processes have received it too, and the first one has reported it
            raise SystemExit(128 + stop.sigval) from None
        return
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with naming_resumption(lambda: how_to_continue(args.output)):
        translate_file(args, load_search)


if __name__ == "__main__":
    sys.exit(run("translate"))
