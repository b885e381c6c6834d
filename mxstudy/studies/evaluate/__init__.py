"""Zero-shot evaluation of a checkpoint."""
