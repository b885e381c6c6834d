"""The step, and what surrounds it: schedule, optimizer, checkpoints, signals."""
