"""Serve a page to translate in the browser, or write a Hugging Face Space with that page.

The page shows the n-best list, the log probability of every token and the attention. It needs Gradio.
"""

import argparse
import sys

from .files import check_output_folder
from .options import Parser, add_dtype, add_trust, positive
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani demo`."""
    parser = Parser(prog="hf-vaswani demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    add_dtype(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at; 0.0.0.0 serves at all addresses of the machine (default: %(default)s)",
    )
    parser.add_argument("--port", type=positive, help="port to serve at (default: the first free one from 7860)")
    parser.add_argument(
        "--share", action="store_true", help="also serve at a public address, which gradio.live provides"
    )
    parser.add_argument(
        "--write-space",
        metavar="FOLDER",
        help="write the files of a Hugging Face Space that serves the page to this folder, and serve nothing",
    )
    add_trust(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani demo`."""
    args = make_parser().parse_args(argv)
    if args.write_space is not None:
        check_output_folder(args.write_space, "--write-space")

    from .inference.demo_page import SERVER, import_gradio, make_page, write_space

    version = import_gradio().__version__
    if args.write_space is not None:
        print(*write_space(args.model, args.write_space, version), sep="\n")
        return

    from .publishing.introduction import introduce

    page = make_page(args.model, args.dtype, args.trust_remote_code, introduce(args.model))
    page.launch(server_name=args.host, server_port=args.port, share=args.share, app_kwargs=SERVER)


if __name__ == "__main__":
    sys.exit(run("demo"))
