"""Sentence pairs: readers, encoding and filters, tokenizer, token-budget batches."""
