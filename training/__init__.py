"""The story of a checkpoint, a stage a file, in reading order:
arguments, tokenizer, data, batching, trainer, train, average, translate, score."""
