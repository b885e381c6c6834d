"""Time calls: one, many in a row, or short ones without launch overhead and cache hits.

`microseconds` is for short calls. On a GPU each of them is captured in a CUDA graph many times, on so many copies of
its input that none is in the L2 cache when its turn comes. All results are kept, so that a call's pending writes in the
cache delay the next calls and are counted. (Reading unrelated data between the calls would hide these writes, and a
copy would seem faster than the memory.) All graphs take turns, so that a GPU that slows down does so for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_log import Span
from mxstudy.probes.memory import GIB

CACHES = 3  # bytes moved between two calls on the same input, in multiples of the L2 cache
GRAPH_US = 500  # about how long the calls of a graph take together
LEAST_ROUNDS, MOST_ROUNDS = 9, 41
WITHOUT_WAITING = 8  # calls between two synchronisations
Calls = Mapping[str, Callable[[Tensor], object]]


class Timed(NamedTuple):
    """A call, from idle GPU to idle GPU, and the GiB that are allocated before it and at its peak (0 on CPU)."""

    span: Span
    before_gib: float
    peak_gib: float

    @property
    def seconds(self) -> float:
        return self.span.ended_s - self.span.began_s


def timed(call: Callable[[], object], device: torch.device) -> Timed:
    """Do the call once, and return its time and memory."""
    is_cuda = device.type == "cuda"
    synchronize(device)
    before = torch.cuda.memory_allocated(device) if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began_s = time.perf_counter()
    call()
    synchronize(device)
    span = Span(began_s, time.perf_counter())
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    return Timed(span, before / GIB, peak / GIB)


def median_and_spread(values: np.ndarray) -> tuple[float, float]:
    """Return the median, and half the interquartile range."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(middle), float(high - low) / 2


def rate(function: Callable[[], object], device: torch.device, least_s: float) -> float:
    """Return calls per second, after three calls that are not counted."""
    for _ in range(3):
        function()
    synchronize(device)
    began_s, calls = time.perf_counter(), 0
    while time.perf_counter() - began_s < least_s:
        for _ in range(WITHOUT_WAITING):
            function()
        calls += WITHOUT_WAITING
        synchronize(device)
    return calls / (time.perf_counter() - began_s)


def bandwidth(device: torch.device, least_s: float) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * rate(lambda: target.copy_(source), device, least_s)


class Microseconds(NamedTuple):
    """The microseconds of a call: first quartile, median and third quartile over the rounds."""

    q1: float
    median: float
    q3: float


def microseconds(calls: Calls, x: Tensor, moved_bytes: int, budget_s: float = 0.2) -> dict[str, Microseconds]:
    """Return {name: quartiles of the time} of each call on x, which moves at least `moved_bytes`.

    This takes about `budget_s` in total, but at least LEAST_ROUNDS rounds of each call.
    """
    rounds = on_gpu(calls, x, moved_bytes, budget_s) if x.is_cuda else on_cpu(calls, x, budget_s)
    return {name: Microseconds(*np.quantile(us, [0.25, 0.5, 0.75]).tolist()) for name, us in rounds.items()}


def on_cpu(calls: Calls, x: Tensor, budget_s: float) -> dict[str, list[float]]:
    """Return {name: microseconds of each round}."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(x)
    began_s = time.perf_counter()
    while len(next(iter(rounds.values()))) < LEAST_ROUNDS or time.perf_counter() - began_s < budget_s:
        for name, call in calls.items():
            before_s = time.perf_counter()
            call(x)
            rounds[name].append((time.perf_counter() - before_s) * 1e6)
    return rounds


def on_gpu(calls: Calls, x: Tensor, moved_bytes: int, budget_s: float) -> dict[str, list[float]]:
    """Return {name: microseconds of a call in each round}, from replays of CUDA graphs."""
    for call in calls.values():
        call(x)  # may compile
    longest_us = max(once_us(partial(call, x)) for call in calls.values())
    copies = -(-CACHES * torch.cuda.get_device_properties(x.device).L2_cache_size // moved_bytes)
    inputs = [x, *(x.clone() for _ in range(copies - 1))]
    inputs *= max(1, int(GRAPH_US / (longest_us * copies)))
    graphs = {name: captured(call, inputs) for name, call in calls.items()}
    for graph in graphs.values():
        graph.replay()
    round_s = sum(once_us(graph.replay) for graph in graphs.values()) / 1e6
    spent: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(int(min(max(budget_s / round_s, LEAST_ROUNDS), MOST_ROUNDS))):
        for name, graph in graphs.items():
            spent[name].append(recorded(graph.replay))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e3 / len(inputs) for a, b in events] for name, events in spent.items()}


def captured(call: Callable[[Tensor], object], inputs: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [call(x) for x in inputs]  # otherwise the next result would reuse this one's memory
    del kept
    return graph


def recorded(function: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    function()
    after.record()
    return before, after


def once_us(function: Callable[[], object]) -> float:
    before, after = recorded(function)
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for all work launched on a GPU. On a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
