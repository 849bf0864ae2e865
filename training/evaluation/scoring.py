"""Scores of translations in files or by a model, with the options of `hf-vaswani score`."""

import argparse
from functools import partial
from pathlib import Path

from sacrebleu.metrics.base import Metric
from tqdm import tqdm

from ..data.treebanks import parse_lines
from ..files import write_whole
from ..inference.loading import load_checkpoint
from ..inference.parsing import parse
from ..inference.translation import translate
from .choices import BRACKETING
from .comet import comet, find_comet
from .metrics import MetricScore, build_metrics, by_length, compare, examples, measure
from .perplexity import perplexities
from .report import Report
from .test_sets import Texts, named_test_set, read_texts, target_language


LENGTH_BOUNDS = [10, 20, 30, 40, 50]


def evaluate_files(args: argparse.Namespace) -> Report:
    """Compute everything that the options of `hf-vaswani score` request.

    Raises:
        DataError: A file is malformed, not parallel to the others, or has empty references. The message names the
            file and the line.
        OSError: A file, model or test set, or COMET, is not available.
        ValueError: Compound-split BLEU does not support the language of the test set.
    """
    # Invalid metrics and a missing COMET fail here, before the work begins.
    metrics = _metrics(args, warn=True)
    if args.comet:
        find_comet(args.comet_program)
    texts, extra = _read(args), []
    if args.model:
        extra += _use_model(args, texts)
    if args.comet:
        extra.append(comet(texts, args.comet, args.comet_program, args.bootstrap))
    hypotheses, references = texts.hypotheses, texts.references
    report = Report(
        system=(args.hypotheses or args.model) + (f" on {args.test_set}" if args.test_set else ""),
        sentences=len(hypotheses),
        empty=sum(not text.strip() for text in hypotheses),
        figures=measure(metrics, hypotheses, references, args.bootstrap) + extra,
    )
    samples = {"bootstrap": args.paired_bootstrap, "randomization": args.paired_randomization}
    for baseline in texts.baselines:
        report.comparisons += compare(_metrics(args), hypotheses, baseline, references, samples)
    if args.by_length is not None:
        report.length_of = "sources" if texts.sources else "first references"
        lengths = [len(text.split()) for text in texts.sources or references[0]]
        report.buckets = by_length(_metrics(args), hypotheses, references, lengths, args.by_length or LENGTH_BOUNDS)
    if args.examples:
        report.examples_by = {"bleu": "sentence BLEU", "chrf": "chrF"}[args.examples_by]
        report.worst, report.best = examples(hypotheses, references, args.examples, args.examples_by, texts.sources)
    return report


def _read(args: argparse.Namespace) -> Texts:
    sources, references = args.sources, args.references
    if args.test_set:
        test_sources, references = named_test_set(args.test_set)
        sources = sources or test_sources
    texts = read_texts(args.hypotheses, references, sources, args.baseline)
    if BRACKETING in args.metrics:
        for file, lines in zip(references, texts.references):
            parse_lines(file, lines)  # to name the line of a malformed tree
    return texts


def _use_model(args: argparse.Namespace, texts: Texts) -> list[MetricScore]:
    """Compute the model's perplexity of the references, and translate the sources unless translations are given. For
    bracketing F1, parse the sources; the references are trees then, which have no perplexity."""
    model, tokenizer = load_checkpoint(args.model, args.dtype, trust_remote_code=args.trust_remote_code)
    is_parsing = BRACKETING in args.metrics
    if texts.hypotheses is None:
        decode, action = (partial(parse, file=args.sources), "Parsing") if is_parsing else (translate, "Translating")
        with tqdm(total=len(texts.sources), unit=" sentences", desc=action) as progress:
            outputs = decode(model, tokenizer, texts.sources, args.batch_tokens, progress)
        texts.hypotheses = [text.replace("\n", " ") for text in outputs]
        if args.output:  # write the translations now, because later steps may fail
            write_whole(Path(args.output), "".join(f"{text}\n" for text in texts.hypotheses))
    if is_parsing:
        return []
    options = {"n_bootstrap": args.bootstrap, "batch_tokens": args.batch_tokens, "name": args.model}
    return perplexities(model, tokenizer, texts.sources, texts.references, **options)


def _metrics(args: argparse.Namespace, warn: bool = False) -> dict[str, Metric]:
    """Build new metrics for each use, because those of sacreBLEU keep the intervals of an earlier use."""
    tokenize = ("none",) if args.tokenized else tuple(args.tokenize or [None])
    target = target_language(args.test_set) if args.test_set else ""
    language = None if args.tokenized else args.language or target or "de"
    return build_metrics(tuple(args.metrics), tokenize, args.lowercase, language, target, warn)
