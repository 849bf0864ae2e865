"""The model card, its facts, and the push to the Hub."""
