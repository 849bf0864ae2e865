"""Search by CTranslate2 with the paper's scores, for `hf-vaswani translate --engine ctranslate2`.

It lies here and not in `inference`, which knows no other toolkit: the command hands it to `file_translation`.

A model is converted once, into a cache below `HF_HOME`. CTranslate2 divides by another length penalty and counts other
tokens, so it searches without one, and its finished hypotheses are scored and sorted as `generate()` does it. Both
extend the same beams. They differ in when they stop: `generate()` when no unfinished hypothesis can still win,
CTranslate2 when a number of hypotheses have finished. That number is the number of beams if one translation is wanted,
otherwise twice as many.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.checksums_vaswani import checksum, weight_files
from hf_vaswani.decoding_vaswani import gnmt_length_penalty

from ..inference.batches import by_threads, share_of_batches
from ..inference.checkpoint_files import CONFIG, TOKENIZER
from ..inference.loading import find_checkpoint, load_checkpoint, source_limit
from ..inference.search import Request, Search, Translation
from .ctranslate2 import special_tokens, vocabulary, write
from .positions import position_count


import ctranslate2  # isort: skip  # after the module above, which says how to install it


logger = logging.getLogger(__name__)

CACHE = Path(HF_HOME, "hf-vaswani", "ctranslate2")
FORMAT = 1  # to be raised when a conversion writes something else
# Search settings that this engine follows.
FOLLOWED = {
    *("num_beams", "length_penalty", "length_penalty_form", "early_stopping"),
    *("max_extra_tokens", "max_length", "max_new_tokens"),
    *("eos_token_id", "bos_token_id", "decoder_start_token_id", "pad_token_id"),
}
# Settings of sampling, outputs and caches, which no search depends on, and a normalisation that changes nothing here.
WITHOUT_EFFECT = {
    *("temperature", "top_k", "top_p", "typical_p", "min_p", "epsilon_cutoff", "eta_cutoff", "num_return_sequences"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    *("use_cache", "cache_implementation", "fast_decoding", "transformers_version", "_from_model_config"),
    "renormalize_logits",
}
NEUTRAL = (None, False, 0, 1.0, [], {})  # values of other settings with which they change nothing


class CTranslate2Search(Search):
    """Search of one model by CTranslate2.

    Args:
        model (`VaswaniForConditionalGeneration`): Model whose settings define the search; its weights are not used.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        translator (`ctranslate2.Translator`): The converted model.
        batch_tokens (`int`): Source tokens per batch.
        n_best (`int`): Translations per sentence.
        scores, log_probabilities (`bool`): As for `Search`.
        **options: Search settings that replace those of the model.

    Raises:
        ValueError: `n_best` exceeds the number of beams, or CTranslate2 cannot follow a setting. The message names it.
    """

    def __init__(
        self,
        model: VaswaniForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        translator: ctranslate2.Translator,
        batch_tokens: int = 1024,
        n_best: int = 1,
        scores: bool = False,
        log_probabilities: bool = False,
        **options,
    ):
        super().__init__(
            [model], tokenizer, batch_tokens, n_best, scores=scores, log_probabilities=log_probabilities, **options
        )
        self.translator, self.settings = translator, check_settings(model, options)
        self.beams = self.settings.get("num_beams") or 1
        self.start, self.end = special_tokens(model)
        self.tokens = vocabulary(tokenizer, model.config.vocab_size)
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def translate(
        self, requests: list[Request], rank: int = 0, processes: int = 1
    ) -> Iterator[tuple[int, list[Translation]]]:
        """Translate requests batch by batch, as many batches at once as torch has threads."""
        lengths = [len(request.ids) for request in requests]
        batches = share_of_batches(self.batches(requests), lengths, rank, processes)
        results = by_threads(lambda batch: self([requests[i] for i in batch]), batches, torch.device("cpu"))
        for batch, translations in zip(batches, results):
            yield from zip(batch, translations)

    def _generate(self, requests: list[Request]) -> tuple[list[list[int]], list[float] | None]:
        outputs, scores = [], []
        for request, result in zip(requests, self._search(requests)):
            prefix_tokens = len(request.prefix)
            hypotheses = [
                (score / self._penalty(len(tokens) - prefix_tokens), [self.start, *map(self.ids.get, tokens)])
                for tokens, score in zip(result.hypotheses, result.scores)
            ]
            for score, output in sorted(hypotheses, key=lambda pair: -pair[0])[: self.n_best]:
                scores.append(score)
                outputs.append(output)
        return outputs, scores if self.search_scores or not self.log_probabilities else None

    def _search(self, requests: list[Request]) -> list[ctranslate2.TranslationResult]:
        """Search of a batch, in which every sentence has its own limit.

        CTranslate2 has one limit for a batch: that of the longest sentence. A search whose hypotheses all ended before
        the limit of their sentence is the same as with that limit; the few others are repeated with it.
        """
        limits = [self._limit(len(request.ids), len(request.prefix)) for request in requests]
        results = self._search_at_once(requests, max(limits))
        for limit in sorted({limit for limit in limits if limit < max(limits)}):
            late = [i for i in range(len(requests)) if limits[i] == limit and _longest(results[i]) >= limit]
            repeated = self._search_at_once([requests[i] for i in late], limit) if late else []
            for index, result in zip(late, repeated):
                results[index] = result
        return results

    def _search_at_once(self, requests: list[Request], limit: int) -> list[ctranslate2.TranslationResult]:
        has_prefix = bool(requests[0].prefix)  # prefixes of a batch have one length
        return self.translator.translate_batch(
            [self._texts(request.ids) for request in requests],
            target_prefix=[self._texts(request.prefix) for request in requests] if has_prefix else None,
            max_decoding_length=limit,
            return_scores=True,
            return_end_token=True,
            min_decoding_length=0,  # by default, the first token cannot be the end token
            max_input_length=0,  # by default, longer sources are cut
            **self._stopping(),
        )

    def _stopping(self) -> dict:
        """Size of the search, and number of hypotheses after which it stops."""
        if self.beams == 1:
            return {"beam_size": 1}
        patience = 1 if self.n_best == 1 else 2
        if self.settings.get("early_stopping") is True:
            # At 1, CTranslate2 also waits for the best beam to finish; transformers does not.
            patience = 1 + 0.1 / self.beams
        finished = round(self.beams * patience)
        return {"beam_size": self.beams, "patience": patience, "num_hypotheses": finished, "length_penalty": 0}

    def _limit(self, source_tokens: int, prefix_tokens: int) -> int:
        """Maximum length of a translation, prefix included."""
        if (new := self.settings.get("max_new_tokens")) is None:
            return self.longest_output(source_tokens)
        return min(prefix_tokens + new, position_count(self.model.config) - 1)

    def _penalty(self, length: int) -> float:
        alpha = self.settings.get("length_penalty")
        alpha = 1.0 if alpha is None else alpha
        if self.settings.get("length_penalty_form") == "gnmt":
            return gnmt_length_penalty(length, alpha)
        return length**alpha

    def _log_probabilities(self, sources: list[list[int]], sequences: list[list[int]]) -> list[list[float]]:
        ended = [sequence[-1:] == [self.end] for sequence in sequences]
        targets = [sequence[:-1] if end else sequence for sequence, end in zip(sequences, ended)]
        texts = ([self._texts(ids) for ids in side] for side in (sources, targets))
        results = self.translator.score_batch(*texts, max_input_length=0)
        # CTranslate2 scores the end token of every text.
        return [result.log_probs if end else result.log_probs[:-1] for result, end in zip(results, ended)]

    def _texts(self, ids: list[int]) -> list[str]:
        return [self.tokens[index] for index in ids]


def _longest(result: ctranslate2.TranslationResult) -> int:
    return max(map(len, result.hypotheses))


def check_settings(model: VaswaniForConditionalGeneration, options: dict) -> dict:
    """Search settings of a model, with options that replace them.

    Raises:
        ValueError: CTranslate2 cannot follow a setting. The message names it.
    """
    if (size := model.config.source_vocab_size) is not None:
        raise ValueError(f"--engine ctranslate2: source_vocab_size: expected one vocabulary, found {size}.")
    settings = {**model.generation_config.to_dict(), **options}
    for name, value in settings.items():
        if name not in FOLLOWED | WITHOUT_EFFECT and value not in NEUTRAL:
            raise ValueError(f"--engine ctranslate2: {name}: expected no such setting, found {value!r}.")
    if all(settings.get(name) is None for name in ("max_extra_tokens", "max_length", "max_new_tokens")):
        raise ValueError("--engine ctranslate2: expected max_extra_tokens, max_length or max_new_tokens, found none.")
    form, stopping = settings.get("length_penalty_form"), settings.get("early_stopping")
    if stopping == "never" and form != "gnmt":
        raise ValueError(f"--engine ctranslate2: early_stopping: expected true or false, found {stopping!r}.")
    return settings


def load_search(args: argparse.Namespace, device: torch.device) -> tuple[Search, int]:
    """Build the search that the options of `hf-vaswani translate` describe, and the maximum number of source tokens.

    Raises:
        ImportError: CTranslate2 is not installed; raised on the import of this module.
        OSError: There is no such checkpoint, or the cache cannot be written.
        ValueError: The checkpoint is malformed, or CTranslate2 cannot represent it or follow its settings.
    """
    [name] = args.model
    weights = "auto" if args.dtype == "int8" else args.dtype
    model, tokenizer = load_checkpoint(name, weights, torch.device("cpu"), args.trust_remote_code)
    kind = "cuda" if device.type == "cuda" else "cpu"
    dtype = "int8" if args.dtype == "int8" else str(model.dtype).removeprefix("torch.")
    if dtype not in (possible := ctranslate2.get_supported_compute_types(kind)):
        raise ValueError(
            f"--dtype {args.dtype}: CTranslate2 does not compute in {dtype} on this {kind}, but in "
            f"{', '.join(sorted(possible))}."
        )
    limit = source_limit([model], args.max_source_tokens)
    options = {"n_best": args.n_best, "scores": args.format != "text", "log_probabilities": args.format == "jsonl"}
    check_settings(model, args.options)
    folder = converted(name, model, tokenizer, dtype)
    model.to("meta")  # frees the weights
    search = CTranslate2Search(
        model, tokenizer, load_translator(folder, dtype, device), args.batch_tokens, **options, **args.options
    )
    check_positions(search, limit)
    return search, limit


def check_positions(search: CTranslate2Search, limit: int) -> None:
    """Raise ValueError if texts of up to `limit` source tokens can exceed the table of positions."""
    places, longest = position_count(search.model.config), search._limit(limit, 0)
    if max(limit, longest) >= places and search.model.config.position_embedding != "learned":
        raise ValueError(
            f"--max-source-tokens {limit}: translations of up to {longest} tokens; --engine ctranslate2 has positions "
            f"for {places - 1}."
        )


def load_translator(folder: Path, dtype: str, device: torch.device) -> ctranslate2.Translator:
    """Load a converted model. On a CPU, it translates as many batches at once as torch has threads.

    Raises:
        ValueError: A file is damaged.
    """
    place = {"device": "cuda", "device_index": device.index or 0} if device.type == "cuda" else {"device": "cpu"}
    at_once = torch.get_num_threads() if device.type == "cpu" else 1
    try:
        with same_threads():
            return ctranslate2.Translator(
                str(folder), compute_type=dtype, inter_threads=at_once, intra_threads=1, **place
            )
    except RuntimeError as error:
        raise ValueError(f"{folder}: CTranslate2: {error}. Delete the folder to convert the model again.") from error


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """Context after which torch has as many threads as before: CTranslate2 sets the number for both of them."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def converted(
    name: str, model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, quantization: str
) -> Path:
    """Folder of a model in the format of CTranslate2; converted if the cache does not have it.

    Entries of the cache are named by the checksums of the checkpoint's files and by the type. Of several processes,
    one converts and the others wait.

    Args:
        name (`str`): Checkpoint folder or Hub repository that the model was loaded from.
        model, tokenizer: As for `write`.
        quantization (`str`): Type of the weights.
    """
    folder = CACHE / cache_key(find_checkpoint(name), model, quantization)
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "convert.lock"):
        for leftover in CACHE.glob("*.partial"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if not folder.is_dir():
            logger.warning("Converting %s to %s.", name, folder)
            write(model, tokenizer, folder, quantization)
    return folder


def cache_key(checkpoint: Path, model: VaswaniForConditionalGeneration, quantization: str) -> str:
    """Digest of everything that a conversion depends on."""
    files = {**weight_files(checkpoint), **{name: checkpoint / name for name in (CONFIG, TOKENIZER)}}
    content = {
        "files": {name: checksum(path)["sha256"] for name, path in sorted(files.items()) if path.is_file()},
        "special tokens": special_tokens(model),
        "quantization": quantization,
        "format": [FORMAT, ctranslate2.__version__],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
