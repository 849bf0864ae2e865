"""BLEU by sacreBLEU with its signature, as an offline module for `evaluate.load`."""

import datasets
import evaluate
import sacrebleu


CITATION = """@inproceedings{post-2018-call, title = {A Call for Clarity in Reporting {BLEU} Scores},
author = {Post, Matt}, booktitle = {WMT}, year = {2018}, url = {https://aclanthology.org/W18-6319}}"""

DESCRIPTION = """Corpus BLEU by sacreBLEU. With `tokenize="13a"` (the default) on raw text, the score is comparable
across papers. With `tokenize="none"` on tokenised text, the score is "tokenised BLEU". It depends on the tokenisation
and must not be compared with the former."""


class Bleu(evaluate.Metric):
    """`compute(predictions=[...], references=[[...], ...], tokenize="13a", lowercase=False)`."""

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

    def _compute(self, predictions, references, tokenize="13a", lowercase=False):
        counts = sorted({len(group) for group in references})
        if len(counts) != 1:
            raise ValueError(f"references: expected equally many for every translation, got {counts}.")
        metric = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
        result = metric.corpus_score(predictions, [list(stream) for stream in zip(*references)])
        return {
            "score": result.score,
            "signature": str(metric.get_signature()),
            "precisions": result.precisions,
            "brevity_penalty": result.bp,
            "hypothesis_length": result.sys_len,
            "reference_length": result.ref_len,
        }
