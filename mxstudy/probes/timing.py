"""Measure the time of each phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import torch

from mxstudy import config
from mxstudy.distributed import largest_over_ranks
from mxstudy.probes.base import ScheduledProbe, StepView, Values

Instant = float | torch.cuda.Event


class Timing(ScheduledProbe):
    """data_ms, forward_ms, backward_ms, clip_ms, optimizer_ms: each over all micro-batches, the maximum over ranks.

    A GPU's time is measured by events that are read after the step, so that nothing waits during it. Other probes that
    watch this step count as forward, and so do the head's gradients, which are computed with its loss.
    """

    name = "timing"

    def __init__(self, settings: config.Timing) -> None:
        super().__init__(settings)
        self.marks: list[tuple[str, Instant]] = []

    def mark(self, phase: str, device: torch.device) -> None:
        """Record that a phase ends now; it began at the previous mark."""
        self.marks.append((phase, instant(device)))

    def measure(self, view: StepView) -> Values:
        return {**largest_over_ranks(self.durations_ms())}

    def durations_ms(self) -> dict[str, float]:
        """Return this rank's times by phase since the last call."""
        durations_ms: dict[str, float] = defaultdict(float)
        for (_, begin), (phase, end) in pairwise(self.marks):
            durations_ms[f"{phase}_ms"] += elapsed_ms(begin, end)
        self.marks = []
        return dict(durations_ms)


def instant(device: torch.device) -> Instant:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_ms(begin: Instant, end: Instant) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end)
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return (end - begin) * 1e3
