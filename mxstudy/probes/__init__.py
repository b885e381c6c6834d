"""Observers of a run: they read what the step leaves behind, and change nothing.

To import this package loads no torch; nor do spikes, outcomes, fractions, histogram_bins, ring_file and names, which
are what results need of it.
"""

from mxstudy.probes.spikes import spike_score

__all__ = ["spike_score"]
