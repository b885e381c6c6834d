"""The training loop and what surrounds it: schedule, optimizer, checkpoints, process group, signals, progress."""
