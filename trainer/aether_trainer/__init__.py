"""The trainer of a run: batches in, checkpoints out, as files; it owns the LoRA weights and the optimizer."""
