"""What a checkpoint knows: the OLMES tasks, scored through lm-eval."""
