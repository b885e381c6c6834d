"""The evaluation study: zero-shot evaluation of a checkpoint."""
