"""Token ids in, translations out: a batch of sentences through `generate()`, with scores and log probabilities."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
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

from .batches import by_threads, token_batches
from .checkpoint_files import GENERATION, check_search
from .forced_decoding import TokenTexts, id_log_probabilities
from .loading import position_limit


@dataclass
class Sampling:
    """How to draw translations.

    Args:
        temperature (`float`): Divides the logits.
        top_k (`int`, *optional*): Draw from so many likeliest tokens.
        top_p (`float`, *optional*): Draw from the likeliest tokens that have this probability together.
        seed (`int`): Of the random numbers.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def warpers(self) -> LogitsProcessorList:
        """What changes the distribution, in the library's order."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class SeededDraw(LogitsProcessor):
    """Leaves of every row's next tokens only one, drawn by random numbers of that row's own.

    So what is drawn for a sentence does not depend on the sentences beside it, up to rounding of the logits.

    Args:
        sampling (`Sampling`): How to draw.
        keys (`list[tuple[int, ...]]`): What makes a row's random numbers, besides the seed.
    """

    def __init__(self, sampling: Sampling, keys: list[tuple[int, ...]]):
        self.warpers = sampling.warpers()
        self.generators = [np.random.default_rng([sampling.seed, *key]) for key in keys]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`input_ids` `(rows, tokens)`, `scores` `(rows, vocabulary)`."""
        sums = self.warpers(input_ids, scores).float().softmax(-1).cumsum(-1)
        draws = [[generator.random(dtype=np.float32)] for generator in self.generators]
        drawn = torch.searchsorted(sums, torch.tensor(draws, device=sums.device) * sums[:, -1:], right=True)
        last = (sums < sums[:, -1:]).sum(-1, keepdim=True)  # the last possible one, should the product be rounded up
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.minimum(last), 0.0)


@dataclass
class Request:
    """A sentence to translate.

    Args:
        ids (`list[int]`): Its tokens, with the end token.
        prefix (`list[int]`): Tokens that every translation begins with.
        key (`tuple[int, ...]`): Tells it from others where translations are drawn at random.
    """

    ids: list[int]
    prefix: list[int] = field(default_factory=list)
    key: tuple[int, ...] = ()


@dataclass
class Translation:
    """One translation of a sentence.

    Args:
        text (`str`): Without special tokens.
        score (`float`): What the search ranks it by; of greedy search and samples, the log probability.
        tokens (`list[tuple[str, float]]`): Every token's text and log probability, the end token's too.
    """

    text: str = ""
    score: float = 0.0
    tokens: list[tuple[str, float]] = field(default_factory=list)

    @property
    def log_probability(self) -> float:
        return sum(number for _, number in self.tokens)

    @classmethod
    def joined(cls, pieces: list["Translation"]) -> "Translation":
        """Of a line from those of its pieces."""
        if len(pieces) == 1:
            return pieces[0]
        tokens = [token for piece in pieces for token in piece.tokens]
        return cls(" ".join(piece.text for piece in pieces), sum(piece.score for piece in pieces), tokens)


class Search:
    """Translates batches of sentences, best translation first.

    Args:
        models (`list[PreTrainedModel]`): In evaluation mode; several decode together, as an ensemble.
        tokenizer (`PreTrainedTokenizerBase`): Of them all.
        batch_tokens (`int`): Source tokens of a batch, padding included.
        n_best (`int`): Translations of each sentence.
        sampling (`Sampling`, *optional*): Draw translations, instead of searching for them.
        scores, log_probabilities (`bool`): Whether translations have these.
        **generate_kwargs: For `generate()`.

    Raises:
        ValueError: The search does not have as many beams as translations to give, or an ensemble is asked for what
            only one model has.
    """

    # Where the library's own loop gives scores it keeps those of the whole vocabulary at every step.
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
            raise ValueError(f"{n_best} translations of a sentence need as many beams, and there are {beams}.")
        self.search_scores = scores and beams > 1 and sampling is None
        self.log_probabilities = log_probabilities or (scores and not self.search_scores)
        if self.log_probabilities and len(models) > 1:
            raise ValueError("Log probabilities are of one model; several have a score, of beam search.")
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
        self.token_texts = TokenTexts(tokenizer)

    def batches(self, requests: list[Request]) -> list[list[int]]:
        """Indices of requests that can be translated together: of similar length, and with prefixes as long."""
        groups = defaultdict(list)
        for index, request in enumerate(requests):
            groups[len(request.prefix)].append(index)
        return [
            [group[i] for i in batch]
            for group in groups.values()
            for batch in token_batches([len(requests[i].ids) for i in group], self.batch_tokens)
        ]

    def longest_output(self, source_tokens: int) -> int | None:
        """Tokens that a translation of so many may have, its prefix included; `None` where nothing says so."""
        config = self.options.get("generation_config", self.model.generation_config).to_dict()
        config |= {name: value for name, value in self.options.items() if value is not None}
        limits = []
        if config.get("max_new_tokens") is None:
            if config.get("max_length") is not None:
                limits.append(config["max_length"] - 1)
            elif config.get("max_extra_tokens") is not None:
                limits.append(source_tokens + config["max_extra_tokens"])
        if (places := position_limit(self.model)) is not None:
            limits.append(places - 1)
        return min(limits, default=None)

    def each(self, requests: list[Request], batches: list[list[int]]) -> Iterator[list[list[Translation]]]:
        """Translations of the requests of every batch, in order; several batches are worked on at once."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(getattr(model, "fixed_weights", contextlib.nullcontext)())
            yield from by_threads(lambda batch: self([requests[i] for i in batch]), batches, self.model.device)

    def __call__(self, requests: list[Request]) -> list[list[Translation]]:
        """`n_best` translations of each sentence, best first; samples in the order drawn. One batch, prefixes of one
        length."""
        outputs, scores = self._generate(requests)
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        sources = [request.ids for request in requests for _ in range(self.n_best)]
        sequences: list[list[int]] = [[]] * len(outputs)
        numbers: list[list[float]] = [[]] * len(outputs)
        if self.log_probabilities:
            sequences = [self._produced(*pair) for pair in zip(outputs, sources)]
            numbers = id_log_probabilities(self.model, self.tokenizer, sources, sequences, self.batch_tokens)
        if scores is None:
            scores = [sum(row) for row in numbers]
        if (wrong := next((score for score in scores if not math.isfinite(score)), None)) is not None:
            raise ValueError(
                f"A translation has the score {wrong}; expected a finite number. The model computes in "
                f"{self.model.dtype}."
            )
        translations = [
            Translation(text, score, [(self.token_texts[token], number) for token, number in zip(sequence, row)])
            for text, score, sequence, row in zip(texts, scores, sequences, numbers)
        ]
        return [translations[i : i + self.n_best] for i in range(0, len(translations), self.n_best)]

    @torch.no_grad()
    def _generate(self, requests: list[Request]) -> tuple[list[list[int]], list[float] | None]:
        """Sequences, `n_best` for each sentence, and their scores where the search has them."""
        if self.keeps_all_scores and len(requests) > 1:
            size = -(-len(requests) // self.PARTS_WITH_SCORES)
            parts = [self._generate_at_once(requests[i : i + size]) for i in range(0, len(requests), size)]
            return [row for part, _ in parts for row in part], [number for _, part in parts for number in part]
        return self._generate_at_once(requests)

    def _generate_at_once(self, requests: list[Request]) -> tuple[list[list[int]], list[float] | None]:
        inputs = self.tokenizer.pad({"input_ids": [r.ids for r in requests]}, return_tensors="pt")
        inputs, options = inputs.to(self.model.device), dict(self.options)
        if requests[0].prefix:
            config = self.model.generation_config
            start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
            prefixes = [[start, *request.prefix] for request in requests]
            options["decoder_input_ids"] = torch.tensor(prefixes, device=self.model.device)
        if self.sampling is not None:
            keys = [(*request.key, number) for request in requests for number in range(self.n_best)]
            options["logits_processor"] = LogitsProcessorList([SeededDraw(self.sampling, keys)])
        if not self.search_scores:
            return self.model.generate(**inputs, **options).tolist(), None
        options |= {"return_dict_in_generate": True, "output_scores": self.keeps_all_scores}
        found = self.model.generate(**inputs, **options)
        if found.sequences_scores is None and not self.keeps_all_scores:  # the library's own loop has them only then
            self.keeps_all_scores = True
            return self._generate(requests)
        return found.sequences.tolist(), found.sequences_scores.tolist()

    def _produced(self, output: list[int], source: list[int]) -> list[int]:
        """The tokens of an output between the start token and what fills it up, the end token included.

        One without an end token goes on to its greatest length; behind that, all is filling, and of beam search may be
        end tokens.
        """
        longest = self.longest_output(len(source))
        tokens = output[1:] if longest is None else output[1 : 1 + longest]
        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []
        return tokens[: 1 + next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
