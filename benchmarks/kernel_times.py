"""List the kernels of training steps, and say how long the GPU waits between them.

The profiled steps are launched one behind the other, as those that are timed. The round before them is profiled as well
and dropped, so that neither the profiler's start nor an idle GPU is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.gpu_log import GpuLog, shown
from benchmarks.report import show
from benchmarks.timing import Timed, timed
from mxstudy.train.loop import TrainingRun, train_step

LONGEST = 60  # kernels that are listed
LARGEST = 12  # gaps between kernels that are listed
NAME = 90  # letters of a kernel's name


def shown_profiles(runs: dict[str, TrainingRun], steps: int) -> dict[str, dict[str, Any]]:
    """Print and return the `kernels` of each arm's step, the longest first, the `waits` between them and the `gaps`."""
    kernels, waits, gaps = {}, {}, {}
    for name, run in runs.items():
        events, round_of, readings = profiled(run, steps)
        kernels[name], waits[name] = kernels_of(events, steps), waits_of(events, round_of, steps) | readings
        gaps[name] = gaps_of(events, steps)
        print(f"\n{name}")
        show(kernels[name])
        show(gaps[name])
    print()
    show([{"arm": name} | shown(one) for name, one in waits.items()])
    return {"kernels": kernels, "waits": waits, "gaps": gaps}


def profiled(run: TrainingRun, steps: int) -> tuple[list[FunctionEvent], Timed, dict[str, Any]]:
    """Return the kernels (on a CPU: the operations) of a round, its time, and the GPU's readings during it."""
    is_cuda = run.device.type == "cuda"

    def train() -> None:
        for step in range(steps):
            train_step(run, step)

    # the operations of the host are left out beside a GPU, because to note them would delay its launches
    activities = [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
    with GpuLog(run.device) as log, profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1)) as of:
        timed(train, run.device)
        of.step()
        round_of = timed(train, run.device)
    where = DeviceType.CUDA if is_cuda else DeviceType.CPU
    events = [one for one in of.events() or [] if one.device_type == where and not one.is_user_annotation]
    return events, round_of, log.over([round_of.span])


def kernels_of(events: Sequence[FunctionEvent], steps: int) -> list[dict[str, Any]]:
    """Return the time of a step by kernel: the longest first, and last the total of all kernels."""
    times: dict[str, list[float]] = {}
    for one in events:
        own_us = one.self_cpu_time_total if one.device_type == DeviceType.CPU else one.time_range.elapsed_us()
        times.setdefault(one.name, []).append(own_us / 1e3 / steps)
    total_ms = sum(map(sum, times.values()))
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    rows = [(name[:NAME], len(own), sum(own)) for name, own in longest] + [("all", len(events), total_ms)]
    return [
        {"kernel": name, "calls": calls / steps, "ms": own_ms, "share": own_ms / total_ms}
        for name, calls, own_ms in rows
    ]


def gaps_of(events: Sequence[FunctionEvent], steps: int) -> list[dict[str, Any]]:
    """Return the time of a step in which no kernel runs, by the kernels before and after it: the longest first.

    What is before a round's first kernel and after its last one is not among them.
    """
    times: dict[tuple[str, str], list[float]] = {}
    before = None
    for one in sorted(events, key=lambda one: one.time_range.start):
        if before and one.time_range.start > before.time_range.end:
            gap_ms = (one.time_range.start - before.time_range.end) / 1e3 / steps
            times.setdefault((before.name[:NAME], one.name[:NAME]), []).append(gap_ms)
        if not before or one.time_range.end > before.time_range.end:
            before = one
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return [{"after": pair[0], "before": pair[1], "gaps": len(own) / steps, "ms": sum(own)} for pair, own in longest]


def waits_of(events: Sequence[FunctionEvent], round_of: Timed, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step as it was profiled, with a kernel running and without one."""
    busy_us, end = 0.0, float("-inf")
    for one in sorted(events, key=lambda one: one.time_range.start):
        busy_us += max(0.0, one.time_range.end - max(one.time_range.start, end))
        end = max(end, one.time_range.end)
    step_ms, busy_ms = 1e3 * round_of.seconds / steps, busy_us / 1e3 / steps
    return {"step_ms": step_ms, "busy_ms": busy_ms, "idle_ms": step_ms - busy_ms}
