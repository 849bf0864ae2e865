"""Score given translations: the log probability that the model gives to each, and to each of its tokens."""

import argparse
import json
import sys

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .score import read_parallel
from .translate import DTYPES, load_checkpoint, positive, token_batches


@torch.no_grad()
def token_log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    translations: list[str],
    batch_tokens: int = 4096,
    progress: tqdm | None = None,
) -> list[list[float]]:
    """Natural logarithms of the probabilities of every translation's tokens, the end token included.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
        sources, translations (`list[str]`): Raw text, as many of the one as of the other.
        batch_tokens (`int`): Tokens of a batch on its longer side, padding included.
        progress (`tqdm`, *optional*): Moved on by one a pair.

    Returns:
        `list[list[float]]`: For each pair, a number a token. Their sum is `-loss` times their count.
    """
    pairs = [
        (tokenizer(source)["input_ids"], tokenizer(text)["input_ids"]) for source, text in zip(sources, translations)
    ]
    results: list[list[float]] = [[]] * len(pairs)
    for batch in token_batches([max(len(side) for side in pair) for pair in pairs], batch_tokens):
        inputs = tokenizer.pad({"input_ids": [pairs[i][0] for i in batch]}, return_tensors="pt").to(model.device)
        targets = tokenizer.pad({"input_ids": [pairs[i][1] for i in batch]}, return_tensors="pt").to(model.device)
        labels = targets["input_ids"]
        decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(**inputs, decoder_input_ids=decoder_inputs).logits.float()
        found = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        for index, row in zip(batch, found.tolist()):
            results[index] = row[: len(pairs[index][1])]
        if progress is not None:
            progress.update(len(batch))
    return results


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani score-pairs`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani score-pairs", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--sources", required=True, help="text file, a sentence a line, plain or .gz")
    parser.add_argument("--translations", required=True, help="their translations, parallel to it")
    parser.add_argument("--tokens", action="store_true", help="print a JSON object a line, with every token's share")
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="tokens of a batch (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    args = parser.parse_args(argv)
    translations, groups = read_parallel(args.translations, [args.sources])
    sources = [group[0] for group in groups]
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    with tqdm(total=len(sources), unit=" pairs", desc="Scoring") as progress:
        results = token_log_probabilities(model, tokenizer, sources, translations, args.batch_tokens, progress)
    for text, numbers in zip(translations, results):
        if not args.tokens:
            print(f"{sum(numbers):.4f}")
            continue
        tokens = tokenizer(text)["input_ids"]
        first = len(tokenizer.decode(tokens[:1]))
        # Behind another token, as at the start of a text a space is left out.
        texts = [tokenizer.decode([tokens[0], token])[first:] for token in tokens]
        shares = [[text, round(number, 4)] for text, number in zip(texts, numbers)]
        print(json.dumps({"log_probability": round(sum(numbers), 4), "tokens": shares}, ensure_ascii=False))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
