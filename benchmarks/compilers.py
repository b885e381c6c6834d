"""Compile ahead what `benchmarks.kernels` measures, in processes that fill the caches of the measuring process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain_norms import EPS, PEERS
from mxstudy.kernels import RowNorm, norm_codes
from mxstudy.numerics.cast import BlockCast

OURS = {"rmsnorm": RowNorm(eps=EPS), "mxnorm": RowNorm(p=2.0, eps=EPS)}
Plain = Callable[[Tensor], object]


def compiled(fmt: str, block_size: int, modes: Sequence[str]) -> dict[str, Plain]:
    """Reset the compiler and return {"PEER MODE": function of x [rows, columns] bf16} for every peer and mode."""
    import torch._inductor.config

    torch._dynamo.reset()
    torch._inductor.config.autotune_local_cache = False  # compilers that run side by side disturb each other's tuning
    return {f"{peer} {mode}": MODES[mode](own(PEERS[peer], mode), fmt, block_size) for peer in PEERS for mode in modes}


def own(function: Callable[..., object], name: str) -> Callable[..., object]:
    """Return a copy of the function with its own code object, because the compiler caches by code object."""
    return FunctionType(function.__code__.replace(co_name=f"{function.__name__}_{name}"), function.__globals__)


def eager(function: Callable[..., object], fmt: str, block_size: int) -> Plain:
    return lambda x: function(x, fmt, block_size)


def static(function: Callable[..., object], fmt: str, block_size: int, mode: str = "default") -> Plain:
    compiled_function = torch.compile(function, dynamic=False, mode=mode)
    return lambda x: compiled_function(x, fmt, block_size)


def dynamic(function: Callable[..., object], fmt: str, block_size: int) -> Plain:
    compiled_function = torch.compile(function)

    def call(x: Tensor) -> object:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled_function(x, fmt, block_size)

    return call


# CUDA graphs are off, because calls are measured in graphs of our own.
autotuned = partial(static, mode="max-autotune-no-cudagraphs")
MODES: dict[str, Callable[..., Plain]] = {"dynamic": dynamic, "static": static, "autotuned": autotuned, "eager": eager}


def compile_group(group: tuple[str, int, int], tokens: Sequence[int], modes: Sequence[str], device: str) -> None:
    """Compile every call of a group in a process of its own, which leaves the code to measure in the caches."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # the other cores compile other groups
    fmt, block_size, hidden_size = group

    def x(rows: int) -> Tensor:
        return torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16)

    for name, call in compiled(fmt, block_size, modes).items():
        for number in tokens[:1] if name.endswith("dynamic") else tokens:
            call(x(number))
    for norm in OURS.values():
        norm_codes(x(tokens[-1]), norm, fmt, BlockCast(block_size))
    if device == "cuda":
        torch.cuda.empty_cache()


class Compilers:
    """Compiles in `workers` processes side by side. With fewer than two, everything is compiled when it is measured."""

    def __init__(self, workers: int, device: str = "cuda") -> None:
        self.device = device
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def compile(self, groups: Sequence[Any], tokens: Sequence[int], modes: Sequence[str], until_s: float) -> None:
        """Compile all groups until the monotonic clock reaches `until_s`. The rest is compiled when it is measured."""
        if self.pool is None:
            return
        began_s = time.monotonic()
        jobs = [self.pool.submit(compile_group, group, tokens, modes, self.device) for group in groups]
        done, late = wait(jobs, timeout=max(until_s - began_s, 0) if until_s < math.inf else None)
        for job in late:
            job.cancel()
        failed = [job for job in done if job.exception()]
        for job in failed[:1]:
            print(f"{len(failed)} of {len(jobs)} groups failed to compile ahead: {job.exception()}", flush=True)
        print(f"{len(done) - len(failed)} groups compiled in {time.monotonic() - began_s:.0f} s", flush=True)
