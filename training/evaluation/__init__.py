"""Scores: metrics, perplexity, COMET, test sets, the report, modules of `evaluate`."""
