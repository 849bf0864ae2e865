"""Checkpoints at work: loading, search over a corpus, forced decoding, attention maps, alignment."""
