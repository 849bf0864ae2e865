"""Metrics of translations, each with its signature and confidence interval.

BLEU, chrF, TER, their bootstrap intervals and the paired significance tests are sacreBLEU's. Compound-split BLEU and
the bracketing F1 of trees implement sacreBLEU's `Metric`.
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

from .choices import BRACKETING, DEFAULT_METRICS, METRICS, TOKENIZERS
from .compound_split import CompoundSplitBLEU


TESTS = {"bootstrap": "bs", "randomization": "ar"}

BRACKETING_NAME = "bracketing F1"
NOTES = {
    "TER": "edits for 100 words of the reference; lower is better.",
    "tokenised BLEU": "computed on the tokens of the input text; not comparable with sacreBLEU.",
    "compound-split BLEU": "the paper's metric, on Moses tokens with compounds split; not comparable with sacreBLEU.",
    BRACKETING_NAME: "EVALB's rules, punctuation by the gold tags; no tree is left out, as EVALB would.",
}


@dataclass(frozen=True)
class Interval:
    """95% confidence interval `mean` ± `half_width` from `samples` bootstrap resamples."""

    mean: float
    half_width: float
    samples: int


@dataclass(frozen=True)
class MetricScore:
    """Score of one metric, with the facts needed to report it.

    Attributes:
        name (`str`): Name of the metric in papers.
        score (`float`): Unrounded score. BLEU, chrF and TER are percentages.
        signature (`str`): Version and settings of the metric.
        interval (`Interval`, *optional*): Confidence interval, if requested.
        details (`dict`): Components of the score.
        note (`str`): Caveat for comparisons.
        digits (`int`): Decimal places in reports.
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
    """Comparison of a system with a baseline in one metric: both scores, and a p-value for each of `TESTS`.

    A p-value estimates how often chance alone gives a difference at least this large.
    """

    metric: str
    baseline: str
    baseline_score: float
    score: float
    p_values: dict[str, float]
    signatures: dict[str, str]


@dataclass(frozen=True)
class Bucket:
    """Scores of the sentences with `shortest` to `longest` words (`None`: unbounded).

    An empty bucket has no scores.
    """

    shortest: int
    longest: int | None
    sentences: int
    scores: dict[str, float]


@dataclass(frozen=True)
class Example:
    """Sentence with its sentence-level score; `line` counts from 1."""

    line: int
    score: float
    hypothesis: str
    references: list[str]
    source: str | None = None


class ResampledCHRF(CHRF):
    """sacreBLEU's chrF with float32 scores for all resamples.

    sacreBLEU returns another type for a resample without any match, and cannot average the two types.
    """

    def _compute_score_from_stats(self, stats):
        result = super()._compute_score_from_stats(stats)
        if isinstance(stats, np.ndarray):  # statistics of a resample
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
    """Build sacreBLEU metrics, by their names in papers.

    Args:
        names (`tuple[str]`): Entries of `METRICS`, or `BRACKETING`.
        tokenize (`tuple[str]`): sacreBLEU tokenisations, one BLEU for each. `None` selects sacreBLEU's default for
            `target_lang`: 13a, except for Chinese, Japanese and Korean.
        lowercase (`bool`): Ignore case. TER always does.
        language (`str`, *optional*): Language of compound-split BLEU's tokeniser; `None` for tokenised text.
        target_lang (`str`): Language code of the translations, if known.
        warn (`bool`): Let sacreBLEU log a warning, at each use, about text that looks tokenised.

    Raises:
        ValueError: Unknown metric, tokenisation or language.
    """
    metrics: dict[str, Metric] = {}
    for name in names:
        if name not in (*METRICS, BRACKETING):
            raise ValueError(f"Unknown metric {name!r}; expected one of {', '.join((*METRICS, BRACKETING))}.")
        if name == BRACKETING:
            # Not at the top: `evaluate` copies this file, but not the folder `data`.
            from .bracketing import Bracketing

            metrics[BRACKETING_NAME] = Bracketing()
        elif name == "bleu":
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
        raise ValueError(f"Unknown tokenisation {tokenize!r}; expected one of {', '.join(TOKENIZERS)}.")
    return BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none" or not warn, trg_lang=target_lang)


def _bleu_name(tokenize: str | None, name_tokenization: bool) -> str:
    if tokenize == "none":
        return "tokenised BLEU"
    return f"sacreBLEU ({tokenize})" if name_tokenization else "sacreBLEU"


def measure(
    metrics: dict[str, Metric],
    hypotheses: list[str],
    references: list[list[str]],
    n_bootstrap: int = 0,
) -> list[MetricScore]:
    """Score translations in each metric.

    Args:
        metrics (`dict[str, Metric]`): From `build_metrics`.
        hypotheses (`list[str]`): Translations.
        references (`list[list[str]]`): Lists of references, each parallel to `hypotheses`.
        n_bootstrap (`int`): Resamples for the intervals; 0 for none. `seeded` sets the seed.
    """
    figures = []
    for name, metric in metrics.items():
        result = metric.corpus_score(hypotheses, references, n_bootstrap=max(n_bootstrap, 1))
        signature = str(metric.get_signature())
        interval = None
        if n_bootstrap > 1:
            formatted = json.loads(result.format(width=12, signature=signature, is_json=True))
            if "confidence_mean" in formatted:  # sacreBLEU omits a mean of 0
                interval = Interval(formatted["confidence_mean"], formatted["confidence_var"], n_bootstrap)
        details = _bleu_details(result) if isinstance(metric, BLEU) else {}
        if name == BRACKETING_NAME:
            details = result.details
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
    """Compare a system with a baseline by sacreBLEU's paired significance tests.

    Args:
        metrics (`dict[str, Metric]`): From `build_metrics`. Metrics that computed intervals cannot be reused.
        system (`list[str]`): Translations of the system.
        baseline (`tuple[str, list[str]]`): Name and translations of the baseline.
        references (`list[list[str]]`): See `measure`.
        samples (`dict[str, int]`, *optional*): Trials for each of `TESTS`; sacreBLEU's defaults, 1000 for the
            bootstrap and 10,000 for the randomization, when not given.
    """
    comparisons = []
    for name, metric in metrics.items():
        p_values, signatures = {}, {}
        for test, code in TESTS.items():
            # One metric at a time: PairedTest keys metrics by name, and two BLEU variants share theirs.
            paired = PairedTest(
                [baseline, ("system", system)],
                {name: metric},
                references,
                test_type=code,
                n_samples=(samples or {}).get(test, 0),
            )
            metric_signatures, scores = paired()
            [signature] = metric_signatures.values()
            [(baseline_result, result)] = [column for key, column in scores.items() if key != "System"]
            # sacreBLEU reports equal scores as significant; the p-value of no difference is 1.
            p_values[test] = 1.0 if result.score == baseline_result.score else result.p_value
            signatures[test] = str(signature)
        comparisons.append(Comparison(name, baseline[0], baseline_result.score, result.score, p_values, signatures))
    return comparisons


def by_length(
    metrics: dict[str, Metric],
    hypotheses: list[str],
    references: list[list[str]],
    lengths: list[int],
    bounds: list[int],
) -> list[Bucket]:
    """Score sentences in buckets of similar length.

    Args:
        metrics, hypotheses, references: See `measure`.
        lengths (`list[int]`): Length of each sentence in words.
        bounds (`list[int]`): Longest length of each bucket, ascending; one more bucket holds all longer sentences.
    """
    buckets = []
    for shortest, longest in zip([0, *(bound + 1 for bound in bounds)], [*bounds, None]):
        members = [i for i, n in enumerate(lengths) if n >= shortest and (longest is None or n <= longest)]
        scores = {}
        if members:
            streams = [[stream[i] for i in members] for stream in references]
            scores = {n: m.corpus_score([hypotheses[i] for i in members], streams).score for n, m in metrics.items()}
        buckets.append(Bucket(shortest, longest, len(members), scores))
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
        hypotheses, references: See `measure`.
        count (`int`): Maximum length of each list.
        by (`str`): "bleu", sacreBLEU's sentence BLEU (effective order), or "chrf".
        sources (`list[str]`, *optional*): Source sentences of the examples.
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
    """Bootstrap interval of a function of a ratio of sums over sentences, with sacreBLEU's resampling and seed.

    Args:
        compute (`Callable`): Function of the ratio.
        numerators, denominators (`list[float]`): One summand for each sentence.
        n_bootstrap (`int`): Resamples. Fewer than 2, or values that are not finite, give no interval.
    """
    if n_bootstrap < 2:
        return None
    seed = current_seed()
    rng = np.random.default_rng(None if seed == "none" else int(seed))
    numerator, denominator = np.array(numerators), np.array(denominators)
    values = np.empty(n_bootstrap)
    for sample in range(n_bootstrap):
        indices = rng.integers(len(numerator), size=len(numerator))
        values[sample] = compute(numerator[indices].sum() / denominator[indices].sum())
    if not np.isfinite(mean := float(values.mean())):
        return None
    values.sort()
    cut = n_bootstrap // 40  # 2.5% on either side
    return Interval(mean, float(values[-1 - cut] - values[cut]) / 2, n_bootstrap)


def current_seed() -> str:
    """sacreBLEU's seed: the environment variable `SACREBLEU_SEED`, or 12345; "none" draws a new seed each time."""
    return os.environ.get("SACREBLEU_SEED", "12345").lower()


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Set sacreBLEU's resampling seed; `None` leaves it unchanged."""
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
