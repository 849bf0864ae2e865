"""Figures of a translation: each with the signature, the interval and the words that it needs to be quoted.

BLEU, chrF, TER, their bootstrap intervals and the tests between systems are sacreBLEU's; compound-split BLEU is one
more metric in its terms, so that all of them go the same way.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from sacrebleu import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from .compound_split import CompoundSplitBLEU


METRICS = ("bleu", "chrf", "chrf++", "ter", "compound-bleu")
DEFAULT_METRICS = ("bleu", "chrf", "chrf++", "ter")
TOKENIZERS = ("13a", "intl", "char", "none")
TESTS = {"bootstrap": "bs", "randomization": "ar"}

NOTES = {
    "TER": "edits for 100 words of the reference; lower is better.",
    "tokenised BLEU": "counts the words of text as it was tokenised beforehand; not comparable with sacreBLEU.",
    "compound-split BLEU": "the paper's count, of Moses' words with compounds split; not comparable with sacreBLEU.",
}


@dataclass(frozen=True)
class Interval:
    """A 95% interval from `samples` bootstrap resamples: `mean` ± `half_width`."""

    mean: float
    half_width: float
    samples: int


@dataclass(frozen=True)
class MetricScore:
    """One figure, with what is needed to quote it.

    Attributes:
        name (`str`): As a paper would call it.
        score (`float`): Unrounded. BLEU, chrF and TER count to 100.
        signature (`str`): What it was computed with and by.
        interval (`Interval`, *optional*): If it was asked for.
        details (`dict`): What it is made of.
        note (`str`): What is to be known before it is compared.
        digits (`int`): Behind the decimal point, for people to read.
    """

    name: str
    score: float
    signature: str
    interval: Interval | None = None
    details: dict = field(default_factory=dict)
    note: str = ""
    digits: int = 2


@dataclass(frozen=True)
class Comparison:
    """A system against a baseline in one metric: the two scores, and the p-value by each of `TESTS`.

    A p-value is about how often chance alone would make a difference as large as this one.
    """

    metric: str
    baseline: str
    baseline_score: float
    score: float
    p_values: dict[str, float]
    signatures: dict[str, str]


@dataclass(frozen=True)
class Bucket:
    """The sentences whose length is from `shortest` to `longest` words (`None`: and longer), and their scores.

    An empty bucket has no scores.
    """

    shortest: int
    longest: int | None
    sentences: int
    scores: dict[str, float]


@dataclass(frozen=True)
class Example:
    """A sentence with its own score; `line` counts from 1."""

    line: int
    score: float
    hypothesis: str
    references: list[str]
    source: str | None = None


class ResampledCHRF(CHRF):
    """sacreBLEU's chrF, whose scores of resamples are of one type: sacreBLEU gives those without any match another
    one, and then has no mean of the two."""

    def _compute_score_from_stats(self, stats):
        result = super()._compute_score_from_stats(stats)
        if isinstance(stats, np.ndarray):  # of a resample
            result.score = np.float32(result.score)
        return result


def build_metrics(
    names: tuple[str, ...] = DEFAULT_METRICS,
    tokenize: tuple[str | None, ...] = (None,),
    lowercase: bool = False,
    language: str | None = "de",
    target_lang: str = "",
    warn: bool = True,
) -> dict[str, Metric]:
    """Metrics by the names that papers call them.

    Args:
        names (`tuple[str]`): Of `METRICS`.
        tokenize (`tuple[str]`): sacreBLEU tokenisations, each a BLEU of its own; `None` is sacreBLEU's choice for
            `target_lang`, which is 13a but for Chinese, Japanese and Korean.
        lowercase (`bool`): Ignore case. TER does anyway.
        language (`str`, *optional*): Language that compound-split BLEU tokenises; `None`: the text is tokenised.
        target_lang (`str`): Language code of the translations, if known.
        warn (`bool`): Let sacreBLEU log a warning, at each use, about text that looks tokenised.

    Raises:
        ValueError: An unknown name, tokenisation or language.
    """
    metrics: dict[str, Metric] = {}
    for name in names:
        if name not in METRICS:
            raise ValueError(f"No metric {name!r}; there are {', '.join(METRICS)}.")
        if name == "bleu":
            for position, choice in enumerate(dict.fromkeys(tokenize)):
                metrics[_bleu_name(choice, position > 0)] = _bleu(choice, lowercase, target_lang, warn)
        elif name == "ter":
            metrics["TER"] = TER()
        elif name == "compound-bleu":
            metrics["compound-split BLEU"] = CompoundSplitBLEU(language, lowercase)
        else:
            metrics["chrF" + name[4:]] = ResampledCHRF(word_order=2 if name == "chrf++" else 0, lowercase=lowercase)
    return metrics


def _bleu(tokenize: str | None, lowercase: bool, target_lang: str, warn: bool) -> BLEU:
    if tokenize is not None and tokenize not in TOKENIZERS:
        raise ValueError(f"No tokenisation {tokenize!r}; there are {', '.join(TOKENIZERS)}.")
    return BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none" or not warn, trg_lang=target_lang)


def _bleu_name(tokenize: str | None, another: bool) -> str:
    if tokenize == "none":
        return "tokenised BLEU"
    return f"sacreBLEU ({tokenize})" if another else "sacreBLEU"


def measure(
    metrics: dict[str, Metric],
    hypotheses: list[str],
    references: list[list[str]],
    n_bootstrap: int = 0,
) -> list[MetricScore]:
    """Figures of a system.

    Args:
        metrics (`dict[str, Metric]`): From `build_metrics`.
        hypotheses (`list[str]`): Translations.
        references (`list[list[str]]`): Lists of references, each parallel to `hypotheses`.
        n_bootstrap (`int`): Resamples for the intervals; 0 for none. sacreBLEU's seed: see `seeded`.
    """
    figures = []
    for name, metric in metrics.items():
        result = metric.corpus_score(hypotheses, references, n_bootstrap=max(n_bootstrap, 1))
        signature = str(metric.get_signature())
        interval = None
        if n_bootstrap > 1:
            told = json.loads(result.format(width=12, signature=signature, is_json=True))
            if "confidence_mean" in told:  # sacreBLEU leaves it out where the mean is 0
                interval = Interval(told["confidence_mean"], told["confidence_var"], n_bootstrap)
        details = _bleu_details(result) if isinstance(metric, BLEU) else {}
        figures.append(MetricScore(name, result.score, signature, interval, details, NOTES.get(name, "")))
    return figures


def _bleu_details(result) -> dict:
    return {
        "precisions": result.precisions,
        "brevity_penalty": result.bp,
        "hypothesis_length": result.sys_len,
        "reference_length": result.ref_len,
    }


def compare(
    metrics: dict[str, Metric],
    system: list[str],
    baseline: tuple[str, list[str]],
    references: list[list[str]],
    samples: dict[str, int] | None = None,
) -> list[Comparison]:
    """sacreBLEU's paired tests of a system against a baseline.

    Args:
        metrics (`dict[str, Metric]`): From `build_metrics`, not used for intervals before.
        system (`list[str]`): Translations.
        baseline (`tuple[str, list[str]]`): Name and translations.
        references (`list[list[str]]`): As for `measure`.
        samples (`dict[str, int]`, *optional*): Of which of `TESTS`, how many trials; sacreBLEU's own numbers, 1000 of
            the bootstrap and 10,000 of the randomization, when not given.
    """
    comparisons = []
    for name, metric in metrics.items():
        p_values, signatures = {}, {}
        for test, code in TESTS.items():
            # One metric at a time: PairedTest tells metrics apart by names that two kinds of BLEU share.
            paired = PairedTest(
                [baseline, ("system", system)],
                {name: metric},
                references,
                test_type=code,
                n_samples=(samples or {}).get(test, 0),
            )
            found, scores = paired()
            [signature] = found.values()
            [(theirs, ours)] = [column for key, column in scores.items() if key != "System"]
            # No difference at all is what chance gives always; sacreBLEU calls it significant.
            p_values[test] = 1.0 if ours.score == theirs.score else ours.p_value
            signatures[test] = str(signature)
        comparisons.append(Comparison(name, baseline[0], theirs.score, ours.score, p_values, signatures))
    return comparisons


def by_length(
    metrics: dict[str, Metric],
    hypotheses: list[str],
    references: list[list[str]],
    lengths: list[int],
    bounds: list[int],
) -> list[Bucket]:
    """Scores of sentences that are about equally long.

    Args:
        metrics, hypotheses, references: As for `measure`.
        lengths (`list[int]`): Of each sentence, in words.
        bounds (`list[int]`): Longest length of each bucket but the last, which takes the rest; rising.
    """
    buckets = []
    for shortest, longest in zip([0, *(bound + 1 for bound in bounds)], [*bounds, None]):
        chosen = [i for i, n in enumerate(lengths) if n >= shortest and (longest is None or n <= longest)]
        scores = {}
        if chosen:
            own = [[stream[i] for i in chosen] for stream in references]
            scores = {n: m.corpus_score([hypotheses[i] for i in chosen], own).score for n, m in metrics.items()}
        buckets.append(Bucket(shortest, longest, len(chosen), scores))
    return buckets


def examples(
    hypotheses: list[str],
    references: list[list[str]],
    count: int,
    by: str = "chrf",
    sources: list[str] | None = None,
) -> tuple[list[Example], list[Example]]:
    """The `count` worst sentences, worst first, and the `count` best, best first; no sentence is in both.

    Args:
        hypotheses, references: As for `measure`.
        count (`int`): Of each, at most.
        by (`str`): "bleu", sacreBLEU's of a sentence (with the effective order), or "chrf".
        sources (`list[str]`, *optional*): To be shown with them.
    """
    metric = BLEU(effective_order=True) if by == "bleu" else CHRF()
    groups = [list(group) for group in zip(*references)]
    scores = [metric.sentence_score(text, group).score for text, group in zip(hypotheses, groups)]
    order = sorted(range(len(scores)), key=scores.__getitem__)

    def example(i: int) -> Example:
        return Example(i + 1, scores[i], hypotheses[i], groups[i], None if sources is None else sources[i])

    worst = order[: min(count, (len(order) + 1) // 2)]
    best = order[len(worst) :][::-1][:count]
    return [example(i) for i in worst], [example(i) for i in best]


def ratio_interval(
    compute: Callable[[np.ndarray], np.ndarray], numerators: list[float], denominators: list[float], n_bootstrap: int
) -> Interval | None:
    """Interval of a figure that is a function of a ratio of two sums over sentences; sacreBLEU's resampling and seed.

    Args:
        compute (`Callable`): The function.
        numerators, denominators (`list[float]`): A number a sentence.
        n_bootstrap (`int`): Resamples; with fewer than 2, or values that are not finite, there is no interval.
    """
    if n_bootstrap < 2:
        return None
    seed = current_seed()
    rng = np.random.default_rng(None if seed == "none" else int(seed))
    above, below = np.array(numerators), np.array(denominators)
    values = np.empty(n_bootstrap)
    for sample in range(n_bootstrap):
        chosen = rng.integers(len(above), size=len(above))
        values[sample] = compute(above[chosen].sum() / below[chosen].sum())
    if not np.isfinite(mean := float(values.mean())):
        return None
    values.sort()
    cut = n_bootstrap // 40  # 2.5% on either side
    return Interval(mean, float(values[-1 - cut] - values[cut]) / 2, n_bootstrap)


def current_seed() -> str:
    """sacreBLEU's seed: `SACREBLEU_SEED` of the environment, or 12345; "none" is a new one each time."""
    return os.environ.get("SACREBLEU_SEED", "12345").lower()


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Let sacreBLEU resample with this seed; `None` leaves it as it is."""
    if seed is None:
        yield
        return
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
