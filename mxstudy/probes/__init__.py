"""Observers of a run: they read what the step leaves behind, and change nothing."""

from mxstudy.probes.spikes import spike_score

__all__ = ["spike_score"]
