"""BLEU, chrF, TER and compound-split BLEU, as in `hf-vaswani score`, as an offline module for `evaluate.load`."""

import datasets
import evaluate

from .choices import DEFAULT_METRICS, METRICS
from .compound_split import LANGUAGES
from .metrics import build_metrics, measure, seeded


CITATION = """@inproceedings{post-2018-call, title = {A Call for Clarity in Reporting {BLEU} Scores},
author = {Post, Matt}, booktitle = {WMT}, year = {2018}, url = {https://aclanthology.org/W18-6319}}"""

DESCRIPTION = f"""Machine translation metrics by sacreBLEU, each with its signature: {", ".join(METRICS)}.
compound-bleu is the metric of "Attention Is All You Need" (Moses tokenisation for {" or ".join(LANGUAGES)}, hyphenated
compounds split), which must not be compared with sacreBLEU."""


class TranslationMetrics(evaluate.Metric):
    """`compute(predictions=[...], references=[[...], ...], metrics=[...], tokenize="13a", lowercase=False,
    language="de", n_bootstrap=0, seed=None)` returns a dictionary for each metric, by name."""

    def _info(self):
        features = {
            "predictions": datasets.Value("string"),
            "references": datasets.Sequence(datasets.Value("string")),
        }
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions: translations; references: for each translation, a list of equal length.",
            features=datasets.Features(features),
        )

    def _compute(
        self,
        predictions,
        references,
        metrics=DEFAULT_METRICS,
        tokenize="13a",
        lowercase=False,
        language="de",
        n_bootstrap=0,
        seed=None,
    ):
        counts = sorted({len(group) for group in references})
        if len(counts) != 1:
            raise ValueError(f"references: expected equally many for every translation, got {counts}.")
        streams = [list(stream) for stream in zip(*references)]
        results = {}
        for name in metrics:
            built = build_metrics((name,), (tokenize,), lowercase, language)
            with seeded(seed):
                [figure] = measure(built, predictions, streams, n_bootstrap)
            results[name] = {"score": figure.score, "signature": figure.signature, **figure.details}
            if figure.interval is not None:
                results[name] |= {"mean": figure.interval.mean, "half_width": figure.interval.half_width}
        return results
