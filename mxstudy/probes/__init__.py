"""Probes observe a run: they read the state after a step, and change nothing.

Importing this package does not load torch; neither do its modules spikes, outcomes, fractions, histogram_bins,
ring_file and names, which mxstudy.results uses.
"""

from mxstudy.probes.spikes import spike_score

__all__ = ["spike_score"]
