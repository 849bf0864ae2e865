"""Convert models of other toolkits to Vaswani checkpoints, and Vaswani checkpoints to other toolkits.

The result is compared with the source before anything is written: logits and best translations of a few sentences.
"""

import argparse
import importlib
import sys
from pathlib import Path

from .files import check_output_folder, folder_written_whole
from .options import Parser
from .running import run


VASWANI = "vaswani"
# Formats and what each is. The module of the same name in `conversion` has `read(folder) -> Conversion`,
# `write(model, tokenizer, folder) -> Agreement` or both.
FORMATS = {
    "marian": "MarianMT of transformers, such as OPUS-MT",
    "fsmt": "FSMT of transformers, such as Facebook's models of WMT19",
    "ctranslate2": "CTranslate2, an inference engine in C++",
    "onnx": "ONNX graphs, for runtimes such as onnxruntime",
    "npz": "Marian's own files: .npz, vocabularies .yml, decoder.yml",
    "fairseq": "fairseq's own files, before 1.0: .pt, dict.LANGUAGE.txt",
}
READABLE = ("marian", "fsmt", "npz", "fairseq")
WRITABLE = ("marian", "ctranslate2", "onnx")
AS_TRAINED = ("marian", "npz")
QUANTIZATIONS = ("float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani convert`."""
    formats = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    parser = Parser(prog="hf-vaswani convert", description=__doc__, epilog=f"Formats: {formats}.")
    parser.add_argument("source", metavar="SOURCE", help="folder or Hub repository of the model to convert")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write: a new or an empty one")
    parser.add_argument(
        "--from", dest="source_format", choices=(*READABLE, VASWANI), help="format of SOURCE (default: recognised)"
    )
    parser.add_argument(
        "--to",
        dest="output_format",
        choices=(*WRITABLE, VASWANI),
        help=f"format of OUTPUT (default: {VASWANI}; {WRITABLE[0]} for a SOURCE that is a Vaswani checkpoint)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help=f"with --to ctranslate2: type of the weights (default: {QUANTIZATIONS[0]})",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the Hub repository (default: its main branch)")
    parser.add_argument(
        "--as-trained",
        action="store_true",
        help="for models of Marian: compute with Marian's own position frequencies, as a table of 1024 positions, and "
        "its own epsilon of layer normalisation (default: with those of transformers and CTranslate2)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani convert`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_output_folder(args.output, "OUTPUT")
    if args.revision and Path(args.source).is_dir():
        parser.error(f"--revision: {args.source} is a folder; only Hub repositories have revisions")

    from .conversion.folders import find_source, recognise

    folder = find_source(args.source, args.revision)
    found = recognise(folder, (*READABLE, VASWANI), args.source_format)
    wanted = args.output_format or (WRITABLE[0] if found == VASWANI else VASWANI)
    if VASWANI not in (found, wanted) or found == wanted:
        parser.error(f"{found} to {wanted}: expected {VASWANI} on one side")
    if args.as_trained and found not in AS_TRAINED:
        parser.error(f"--as-trained: expected a model of Marian, found {found}")
    if args.quantization and wanted != "ctranslate2":
        parser.error(f"--quantization: expected --to ctranslate2, found {wanted}")
    if found == VASWANI:
        _write(folder, args.output, wanted, {"quantization": args.quantization} if args.quantization else {})
    else:
        options = {"as_trained": True} if args.as_trained else {}
        record = {"source": args.source, "revision": args.revision, "format": found, **options}
        _read(folder, args.output, found, record, options)


def _read(folder: Path, output: str, name: str, record: dict, options: dict) -> None:
    """Convert a model of another toolkit, and say how well the result agrees with it."""
    from .conversion.folders import write_checked

    with folder_written_whole(Path(output)) as partial:
        conversion = importlib.import_module(f".conversion.{name}", __package__).read(folder, **options)
        agreement, measured_on, tokenizer = write_checked(conversion, folder, partial, record)
    print(f"{output}: checked on {measured_on}: {agreement}.\nTokenizer {tokenizer}.")


def _write(folder: Path, output: str, name: str, options: dict) -> None:
    """Convert a Vaswani checkpoint to another toolkit."""
    import torch

    from hf_vaswani import VaswaniForConditionalGeneration

    from .inference.loading import load_model, load_tokenizer

    module = importlib.import_module(f".conversion.{name}", __package__)
    model = load_model(folder, VaswaniForConditionalGeneration, dtype=torch.float32).eval()
    agreement = module.write(model, load_tokenizer(folder), output, **options)
    print(f"{output}: checked on text: {agreement}.")


if __name__ == "__main__":
    sys.exit(run("convert"))
