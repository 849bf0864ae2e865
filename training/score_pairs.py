"""Score given translations: print the log probability that a model assigns to each translation and to its tokens."""

import argparse
import json
import sys

from .data.readers import read_parallel
from .options import Parser, add_dtype, add_trust, positive
from .running import run


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani score-pairs`."""
    parser = Parser(prog="hf-vaswani score-pairs", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--sources", required=True, help="text file with one sentence per line, plain or .gz")
    parser.add_argument("--translations", required=True, help="file of translations, parallel to --sources")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="print one JSON object per line, with the log probability of every token",
    )
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="tokens per batch (default: %(default)s)")
    add_dtype(parser)
    add_trust(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani score-pairs`."""
    args = make_parser().parse_args(argv)
    translations, groups = read_parallel(args.translations, [args.sources])
    sources = [group[0] for group in groups]

    from tqdm import tqdm

    from .inference.forced_decoding import TokenTexts, token_log_probabilities
    from .inference.loading import load_checkpoint

    model, tokenizer = load_checkpoint(args.model, args.dtype, trust_remote_code=args.trust_remote_code)
    with tqdm(total=len(sources), unit=" pairs", desc="Scoring") as progress:
        results = token_log_probabilities(model, tokenizer, sources, translations, args.batch_tokens, progress)
    texts = TokenTexts(tokenizer)
    for text, numbers in zip(translations, results):
        if not args.tokens:
            print(f"{sum(numbers):.4f}")
            continue
        ids = tokenizer(text_target=text)["input_ids"]
        tokens = [[texts[token], round(number, 4)] for token, number in zip(ids, numbers)]
        line = {"log_probability": round(sum(numbers), 4), "tokens": tokens}
        print(json.dumps(line, ensure_ascii=False, allow_nan=False))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run("score-pairs"))
