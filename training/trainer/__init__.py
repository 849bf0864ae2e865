"""Training runs: arguments, trainer, checkpoints, manifest, averaging, fine-tuning."""
