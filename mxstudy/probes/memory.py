"""Measure how much memory a run uses."""

from __future__ import annotations

import psutil
import torch

from mxstudy.distributed import largest_over_ranks
from mxstudy.probes.base import ScheduledProbe, StepView, Values

GIB = 2**30


class Memory(ScheduledProbe):
    """Memory in GiB, the maximum over ranks. rss_gib: the process's memory on the host.

    On a GPU also allocated_gib and reserved_gib at the end of the step, and peak_gib, the largest allocation since the
    last row.
    """

    name = "memory"

    def measure(self, view: StepView) -> Values:
        values = {"rss_gib": psutil.Process().memory_info().rss / GIB}
        device = next(view.model.parameters()).device
        return {**largest_over_ranks(values | gpu_memory(device) if device.type == "cuda" else values)}


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the GPU's memory in GiB, and reset its peak for the next row."""
    read = {
        "allocated_gib": torch.cuda.memory_allocated,
        "reserved_gib": torch.cuda.memory_reserved,
        "peak_gib": torch.cuda.max_memory_allocated,
    }
    values = {name: bytes_of(device) / GIB for name, bytes_of in read.items()}
    torch.cuda.reset_peak_memory_stats(device)
    return values
