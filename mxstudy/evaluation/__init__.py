"""Evaluate checkpoints: the OLMES tasks, scored through lm-eval."""
