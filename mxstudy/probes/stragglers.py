"""Measure the speed of each rank, and find the stragglers that the others wait for."""

from __future__ import annotations

import resource
import socket
import sys

import torch

from mxstudy import config
from mxstudy.distributed import all_of, gather_over_ranks, is_first
from mxstudy.probes.base import StepView, Values
from mxstudy.probes.memory import GIB
from mxstudy.probes.timing import Timing, elapsed_ms, instant

EVERY_STEPS = 10
SLOW = 1.1  # a rank that takes more than this times the median rank's time is a straggler
MATMUL = {"cuda": (4096, torch.bfloat16, 8), "cpu": (256, torch.float32, 4)}  # size, dtype, how many


class Ranks(Timing):
    """Lists with one value per rank: step_ms, tokens_per_s, memory_gib (peak), own_ms, matmul_ms.

    All ranks take the same time for a step, because they wait for each other. They are told apart by their work without
    the others: own_ms, fetching data and the optimizer, and matmul_ms, a matrix product of the same size on each.
    `slowdown`: the step's time with the slowest rank over its time with the median one. `stragglers`: their rank
    numbers. Not measured at step 0, which compiles.
    """

    name = "ranks"

    def __init__(self, tokens_per_step: int) -> None:
        super().__init__(config.Timing(every_steps=EVERY_STEPS))
        self.tokens_per_step = tokens_per_step
        self.hosts = all_of(socket.gethostname())

    def measure(self, view: StepView) -> Values:
        phases, device = self.durations_ms(), next(view.model.parameters()).device
        if view.step == 0:
            return {}
        step_ms, own_ms = sum(phases.values()), phases["data_ms"] + phases["optimizer_ms"]
        mine = torch.tensor([[step_ms, own_ms, matmul_ms(device), peak_gib(device)]], dtype=torch.float64)
        steps_ms, owns_ms, matmuls_ms, memory_gib = gather_over_ranks(mine).T
        slowdowns = slowdowns_of(steps_ms, owns_ms, matmuls_ms)
        stragglers = (slowdowns > SLOW).nonzero().flatten().tolist()
        for straggler in stragglers if is_first() else ():
            where, times = f"rank {straggler} on {self.hosts[straggler]}", slowdowns[straggler]
            print(f"step {view.step}: {where} makes the step {times:.2f} times as long", file=sys.stderr, flush=True)
        tokens_per_s = self.tokens_per_step / len(steps_ms) / (steps_ms / 1e3)
        lists = {"step_ms": steps_ms, "tokens_per_s": tokens_per_s, "memory_gib": memory_gib}
        lists |= {"own_ms": owns_ms, "matmul_ms": matmuls_ms}
        values: Values = {name: column.tolist() for name, column in lists.items()}
        return values | {"slowdown": slowdowns.max().item(), "stragglers": stragglers}


def slowdowns_of(steps_ms: torch.Tensor, owns_ms: torch.Tensor, matmuls_ms: torch.Tensor) -> torch.Tensor:
    """Return for each rank the factor by which a step takes longer than with the median rank."""
    late_ms = owns_ms - owns_ms.median()
    late = late_ms / (steps_ms.max() - late_ms.max()).clamp_min(1e-3)
    return torch.maximum(1 + late, matmuls_ms / matmuls_ms.median())


def matmul_ms(device: torch.device) -> float:
    size, dtype, repeats = MATMUL[device.type]
    x = torch.ones(size, size, dtype=dtype, device=device)
    began = instant(device)
    for _ in range(repeats):
        x @ x
    return elapsed_ms(began, instant(device)) / repeats


def peak_gib(device: torch.device) -> float:
    """Return the peak memory of the GPU, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
