"""Translate batches of token ids through `generate()`, with scores and log probabilities."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_vaswani import VaswaniConfig

from .batches import by_threads, share_of_batches, token_batches
from .checkpoint_files import GENERATION, check_search
from .forced_decoding import TokenTexts, id_log_probabilities
from .loading import position_limit


@dataclass
class Sampling:
    """Sampling parameters.

    Args:
        temperature (`float`): Divisor of the logits.
        top_k (`int`, *optional*): Number of most probable tokens to sample from.
        top_p (`float`, *optional*): Probability mass of the most probable tokens to sample from.
        seed (`int`): Random seed.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def warpers(self) -> LogitsProcessorList:
        """Logits warpers for these parameters, in the order that transformers applies them."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class SeededDraw(LogitsProcessor):
    """Sample the next token of each row with a random generator of its own; all other tokens get a score of -inf.

    The sample of a sentence does not depend on the rest of the batch, up to rounding of the logits.

    Args:
        sampling (`Sampling`): Sampling parameters.
        keys (`list[tuple[int, ...]]`): One key per row, which seeds its generator together with `sampling.seed`.
    """

    def __init__(self, sampling: Sampling, keys: list[tuple[int, ...]]):
        self.warpers = sampling.warpers()
        self.generators = [np.random.default_rng([sampling.seed, *key]) for key in keys]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Sample from `scores` `(rows, vocabulary)`, given `input_ids` `(rows, tokens)`."""
        cumulative = self.warpers(input_ids, scores).float().softmax(-1).cumsum(-1)
        draws = [[generator.random(dtype=np.float32)] for generator in self.generators]
        drawn = torch.searchsorted(
            cumulative, torch.tensor(draws, device=cumulative.device) * cumulative[:, -1:], right=True
        )
        last = (cumulative < cumulative[:, -1:]).sum(
            -1, keepdim=True
        )  # the last token of non-zero probability: the product may be rounded up
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.minimum(last), 0.0)


@dataclass
class Request:
    """A sentence to translate.

    Args:
        ids (`list[int]`): Source tokens, with the end token.
        prefix (`list[int]`): Target tokens that every translation must begin with.
        key (`tuple[int, ...]`): Key of the sentence's random generators in sampling.
        words (`list[str]`): Words of the sentence, for the search of a parser.
    """

    ids: list[int]
    prefix: list[int] = field(default_factory=list)
    key: tuple[int, ...] = ()
    words: list[str] = field(default_factory=list)


@dataclass
class Translation:
    """Translation of a sentence.

    Args:
        text (`str`): Text without special tokens.
        score (`float`): Score of beam search; for greedy search and sampling, the log probability.
        tokens (`list[tuple[str, float]]`): Text and log probability of each token, end token included.
    """

    text: str = ""
    score: float = 0.0
    tokens: list[tuple[str, float]] = field(default_factory=list)

    @property
    def log_probability(self) -> float:
        return sum(log_probability for _, log_probability in self.tokens)

    @classmethod
    def joined(cls, pieces: list["Translation"]) -> "Translation":
        """Join the translations of the pieces of a line."""
        if len(pieces) == 1:
            return pieces[0]
        tokens = [token for piece in pieces for token in piece.tokens]
        return cls(" ".join(piece.text for piece in pieces), sum(piece.score for piece in pieces), tokens)


class Search:
    """Translate batches of sentences by beam search, greedy search or sampling.

    Args:
        models (`list[PreTrainedModel]`): Models in evaluation mode; several models decode as an ensemble.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer shared by all models.
        batch_tokens (`int`): Source tokens per batch, padding included.
        n_best (`int`): Translations per sentence.
        sampling (`Sampling`, *optional*): Parameters for sampling; search if not given.
        scores, log_probabilities (`bool`): Compute the scores and the log probabilities of the translations.
        **generate_kwargs: Options of `generate()`.

    Attributes:
        constraint (`Callable`, *optional*): Builds a logits processor for a batch of requests.

    Raises:
        ValueError: `n_best` exceeds the number of beams, or log probabilities are requested from an ensemble.
    """

    # The beam search of transformers returns sequence scores only if it stores the scores of the whole vocabulary at
    # each step. A batch is then split into this many parts to limit memory.
    PARTS_WITH_SCORES = 8

    def __init__(
        self,
        models: list[PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        batch_tokens: int = 4096,
        n_best: int = 1,
        sampling: Sampling | None = None,
        scores: bool = False,
        log_probabilities: bool = False,
        **generate_kwargs,
    ):
        self.models, self.model, self.tokenizer, self.batch_tokens = models, models[0], tokenizer, batch_tokens
        self.n_best, self.sampling = n_best, sampling
        beams = generate_kwargs.get("num_beams") or self.model.generation_config.num_beams or 1
        if sampling is None and n_best > beams:
            raise ValueError(f"n_best={n_best} needs at least {n_best} beams, got num_beams={beams}.")
        self.search_scores = scores and beams > 1 and sampling is None
        self.log_probabilities = log_probabilities or (scores and not self.search_scores)
        if self.log_probabilities and len(models) > 1:
            raise ValueError(
                f"Log probabilities need a single model, got an ensemble of {len(models)}, which has beam scores only."
            )
        self.options = {**generate_kwargs, "num_return_sequences": n_best, "return_dict_in_generate": False}
        if isinstance(self.model.config, VaswaniConfig):
            settings = {**self.model.generation_config.to_dict(), **self.options}
            check_search(self.model.config, settings, "The search")
            if settings.get("decoder_start_token_id") is None and settings.get("bos_token_id") is None:
                raise ValueError(
                    f"{self.model.name_or_path}: {GENERATION}: decoder_start_token_id: expected an id, found none, "
                    "nor a bos_token_id."
                )
        if sampling is not None:
            self.options |= {"do_sample": True, "num_beams": 1}
        if len(models) > 1:
            self.options["ensemble"] = models[1:]
        self.keeps_all_scores = False
        self.constraint: Callable[[list[Request]], LogitsProcessor] | None = None
        self.token_texts = TokenTexts(tokenizer)

    def batches(self, requests: list[Request]) -> list[list[int]]:
        """Indices of requests in batches of similar source length and equal prefix length."""
        groups = defaultdict(list)
        for index, request in enumerate(requests):
            groups[len(request.prefix)].append(index)
        return [
            [group[i] for i in batch]
            for group in groups.values()
            for batch in token_batches([len(requests[i].ids) for i in group], self.batch_tokens)
        ]

    def longest_output(self, source_tokens: int) -> int | None:
        """Maximum length of a translation of `source_tokens` tokens, prefix included; `None` if there is no limit."""
        config = self.options.get("generation_config", self.model.generation_config).to_dict()
        config |= {name: value for name, value in self.options.items() if value is not None}
        limits = []
        if config.get("max_new_tokens") is None:
            if config.get("max_length") is not None:
                limits.append(config["max_length"] - 1)
            elif config.get("max_extra_tokens") is not None:
                limits.append(source_tokens + config["max_extra_tokens"])
        if (positions := position_limit(self.model)) is not None:
            limits.append(positions - 1)
        return min(limits, default=None)

    def translate(
        self, requests: list[Request], rank: int = 0, processes: int = 1
    ) -> Iterator[tuple[int, list[Translation]]]:
        """Translate requests batch by batch; on a CPU, several batches in parallel.

        Args:
            requests (`list[Request]`): Requests in any order, identical in all processes.
            rank, processes (`int`): Rank of this process, and number of processes that share the batches.

        Yields:
            The index of a request and its translations, as returned by [`__call__`].
        """
        lengths = [len(request.ids) for request in requests]
        batches = share_of_batches(self.batches(requests), lengths, rank, processes)
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(getattr(model, "fixed_weights", contextlib.nullcontext)())
            results = by_threads(lambda batch: self([requests[i] for i in batch]), batches, self.model.device)
            for batch, translations in zip(batches, results):
                yield from zip(batch, translations)

    def __call__(self, requests: list[Request]) -> list[list[Translation]]:
        """Translate one batch of requests whose prefixes have the same length.

        Returns:
            `list[list[Translation]]`: `n_best` translations of each sentence, best first; samples in the order drawn.
        """
        outputs, scores = self._generate(requests)
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        sources = [request.ids for request in requests for _ in range(self.n_best)]
        sequences: list[list[int]] = [[]] * len(outputs)
        log_probabilities: list[list[float]] = [[]] * len(outputs)
        if self.log_probabilities:
            sequences = [self._generated_tokens(*pair) for pair in zip(outputs, sources)]
            log_probabilities = self._log_probabilities(sources, sequences)
        if scores is None:
            scores = [sum(row) for row in log_probabilities]
        if (wrong := next((score for score in scores if not math.isfinite(score)), None)) is not None:
            raise ValueError(
                f"A translation has the score {wrong}; expected a finite number. The model computes in "
                f"{self.model.dtype}."
            )
        translations = [
            Translation(text, score, [(self.token_texts[token], value) for token, value in zip(sequence, row)])
            for text, score, sequence, row in zip(texts, scores, sequences, log_probabilities)
        ]
        return [translations[i : i + self.n_best] for i in range(0, len(translations), self.n_best)]

    def _log_probabilities(self, sources: list[list[int]], sequences: list[list[int]]) -> list[list[float]]:
        return id_log_probabilities(self.model, self.tokenizer, sources, sequences, self.batch_tokens)

    @torch.no_grad()
    def _generate(self, requests: list[Request]) -> tuple[list[list[int]], list[float] | None]:
        """Generate `n_best` sequences per sentence, and their scores if the search returns them."""
        if self.keeps_all_scores and len(requests) > 1:
            size = -(-len(requests) // self.PARTS_WITH_SCORES)
            parts = [self._generate_at_once(requests[i : i + size]) for i in range(0, len(requests), size)]
            return [row for part, _ in parts for row in part], [score for _, part in parts for score in part]
        return self._generate_at_once(requests)

    def _generate_at_once(self, requests: list[Request]) -> tuple[list[list[int]], list[float] | None]:
        inputs = self.tokenizer.pad({"input_ids": [r.ids for r in requests]}, return_tensors="pt")
        inputs, options = inputs.to(self.model.device), dict(self.options)
        if requests[0].prefix:
            config = self.model.generation_config
            start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
            prefixes = [[start, *request.prefix] for request in requests]
            options["decoder_input_ids"] = torch.tensor(prefixes, device=self.model.device)
        processors = LogitsProcessorList([] if self.constraint is None else [self.constraint(requests)])
        if self.sampling is not None:
            keys = [(*request.key, sample) for request in requests for sample in range(self.n_best)]
            processors.append(SeededDraw(self.sampling, keys))
        if processors:
            options["logits_processor"] = processors
        if not self.search_scores:
            return self.model.generate(**inputs, **options).tolist(), None
        options |= {"return_dict_in_generate": True, "output_scores": self.keeps_all_scores}
        output = self.model.generate(**inputs, **options)
        # transformers' own beam search returns sequence scores only together with all scores.
        if output.sequences_scores is None and not self.keeps_all_scores:
            self.keeps_all_scores = True
            return self._generate(requests)
        return output.sequences.tolist(), output.sequences_scores.tolist()

    def _generated_tokens(self, output: list[int], source: list[int]) -> list[int]:
        """Strip the start token and the padding from an output, and keep the end token.

        An output without an end token extends to its maximum length. All tokens after it are padding, which may
        consist of end tokens after beam search.
        """
        longest = self.longest_output(len(source))
        tokens = output[1:] if longest is None else output[1 : 1 + longest]
        end_tokens = self.model.generation_config.eos_token_id
        end_tokens = [end_tokens] if isinstance(end_tokens, int) else end_tokens or []
        return tokens[: 1 + next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))]
