"""How long calls take that are too short for the host: on a GPU without launches and caches, on a CPU as they are.

Each call is captured in a CUDA graph, several times over, with something before each that reads three times the L2
cache; a graph of that reading alone is taken off. All graphs take turns, so that a GPU that slows down does so for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

L2_READS, LEAST_ROUNDS, MOST_ROUNDS, MOST_CALLS = 3, 9, 41, 8
Calls = Mapping[str, Callable[[], object]]


class Microseconds(NamedTuple):
    """Of a call: first quartile, median, third quartile."""

    q1: float
    median: float
    q3: float


def microseconds(calls: Calls, device: torch.device, budget_s: float = 0.2) -> dict[str, Microseconds]:
    """Of each call; about `budget_s` in all, but LEAST_ROUNDS of each."""
    rounds = on_gpu(calls, device, budget_s) if device.type == "cuda" else on_cpu(calls, budget_s)
    return {name: Microseconds(*np.quantile(us, [0.25, 0.5, 0.75]).tolist()) for name, us in rounds.items()}


def on_cpu(calls: Calls, budget_s: float) -> dict[str, list[float]]:
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began_s = time.perf_counter()
    while len(next(iter(rounds.values()))) < LEAST_ROUNDS or time.perf_counter() - began_s < budget_s:
        for name, call in calls.items():
            before_s = time.perf_counter()
            call()
            rounds[name].append((time.perf_counter() - before_s) * 1e6)
    return rounds


def on_gpu(calls: Calls, device: torch.device, budget_s: float) -> dict[str, list[float]]:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    unrelated = torch.zeros(L2_READS * l2_bytes // 4, dtype=torch.float32, device=device)
    for call in calls.values():
        call()  # it may compile
    longest_us = max(once_us(call) for call in calls.values())
    repeats = int(min(max(500 / longest_us, 1), MOST_CALLS))
    graphs = {name: captured(call, unrelated, repeats) for name, call in calls.items()}
    nothing = captured(None, unrelated, repeats)
    for graph in (nothing, *graphs.values()):
        graph.replay()
    round_s = sum(once_us(graph.replay) for graph in (nothing, *graphs.values())) / 1e6
    spent: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in ("", *graphs)}
    for _ in range(int(min(max(budget_s / round_s, LEAST_ROUNDS), MOST_ROUNDS))):
        for name, graph in {"": nothing, **graphs}.items():
            spent[name].append(recorded(graph.replay))
    torch.cuda.synchronize()
    us = {name: [a.elapsed_time(b) * 1e3 / repeats for a, b in events] for name, events in spent.items()}
    reading_us = float(np.median(us.pop("")))
    return {name: [each - reading_us for each in of_call] for name, of_call in us.items()}


def captured(call: Callable[[], object] | None, unrelated: torch.Tensor, repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            unrelated.amax()
            if call is not None:
                call()
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
