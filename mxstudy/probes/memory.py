"""How much memory a run holds."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.distributed import largest_over_ranks
from mxstudy.probes.base import StepView, Values

GIB = 2**30


class Memory:
    """rss_gib: of the process, on the host. On a GPU also allocated_gib and reserved_gib, as the step ends, and
    peak_gib, the most that was allocated at any time since the last row. Of several ranks the most."""

    name = "memory"

    def __init__(self, settings: config.Memory) -> None:
        self.every_steps = settings.every_steps

    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        """Activations are of no interest here."""

    def measure(self, view: StepView) -> Values:
        values = {"rss_gib": psutil.Process().memory_info().rss / GIB}
        device = next(view.model.parameters()).device
        return {**largest_over_ranks(values | gpu_memory(device) if device.type == "cuda" else values)}


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Begins the next row's peak."""
    read = {
        "allocated_gib": torch.cuda.memory_allocated,
        "reserved_gib": torch.cuda.memory_reserved,
        "peak_gib": torch.cuda.max_memory_allocated,
    }
    values = {name: bytes_of(device) / GIB for name, bytes_of in read.items()}
    torch.cuda.reset_peak_memory_stats(device)
    return values
