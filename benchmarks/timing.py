"""Time short calls: on a GPU without launch overhead and cache hits, on a CPU as they are.

Each call is captured in a CUDA graph many times, on so many copies of its input that none is in the L2 cache when its
turn comes. All results are kept, so that a call's pending writes in the cache delay the next calls and are counted.
(Reading unrelated data between the calls would hide these writes, and a copy would seem faster than the memory.) All
graphs take turns, so that a GPU that slows down does so for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CACHES = 3  # bytes moved between two calls on the same input, in multiples of the L2 cache
GRAPH_US = 500  # about how long the calls of a graph take together
LEAST_ROUNDS, MOST_ROUNDS = 9, 41
Calls = Mapping[str, Callable[[Tensor], object]]


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
