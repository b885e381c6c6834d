"""All that `benchmarks.kernels` compiles: ahead of time, in processes whose caches the one that measures finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain_norms import EPS, NORMS
from mxstudy.kernels import RowNorm, norm_codes
from mxstudy.numerics.cast import BlockCast

OURS = {"rmsnorm": RowNorm(eps=EPS), "mxnorm": RowNorm(p=2.0, eps=EPS)}
Plain = Callable[[Tensor], object]


def compiled(fmt: str, block_size: int, modes: Sequence[str]) -> dict[str, Plain]:
    """Every norm in every mode, of x [rows, columns] bf16, by "NORM MODE"; what was made before is forgotten."""
    import torch._inductor.config

    torch._dynamo.reset()
    torch._inductor.config.autotune_local_cache = False  # what compilers that disturb each other find best is not kept
    return {f"{norm} {mode}": MODES[mode](own(NORMS[norm], mode), fmt, block_size) for norm in NORMS for mode in modes}


def own(function: Callable[..., object], name: str) -> Callable[..., object]:
    """A function with code of its own: the compiler shares what it makes of one, whatever the mode."""
    return FunctionType(function.__code__.replace(co_name=f"{function.__name__}_{name}"), function.__globals__)


def eager(function: Callable[..., object], fmt: str, block_size: int) -> Plain:
    return lambda x: function(x, fmt, block_size)


def static(function: Callable[..., object], fmt: str, block_size: int) -> Plain:
    made = torch.compile(function, dynamic=False)
    return lambda x: made(x, fmt, block_size)


def dynamic(function: Callable[..., object], fmt: str, block_size: int) -> Plain:
    made = torch.compile(function)

    def call(x: Tensor) -> object:
        torch._dynamo.mark_dynamic(x, 0)
        return made(x, fmt, block_size)

    return call


MODES = {"dynamic": dynamic, "static": static, "eager": eager}


def compile_group(group: tuple[str, int, int], tokens: Sequence[int], modes: Sequence[str], device: str) -> None:
    """In a process of its own: of every call the code that will be measured is in the caches afterwards."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # the other cores have groups of their own
    fmt, block_size, hidden_size = group

    def x(rows: int) -> Tensor:
        return torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16)

    for name, call in compiled(fmt, block_size, modes).items():
        for number in tokens if name.endswith("static") else tokens[:1]:
            call(x(number))
    for norm in OURS.values():
        norm_codes(x(tokens[-1]), norm, fmt, BlockCast(block_size))
    if device == "cuda":
        torch.cuda.empty_cache()


class Compilers:
    """So many processes side by side; fewer than two are none, and all is compiled when it is measured."""

    def __init__(self, workers: int, device: str = "cuda") -> None:
        self.device = device
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def compile(self, groups: Sequence[Any], tokens: Sequence[int], modes: Sequence[str], until_s: float) -> None:
        """Until all is done or the monotonic clock is at `until_s`; what is missing then is compiled when measured."""
        if self.pool is None:
            return
        began_s = time.monotonic()
        jobs = [self.pool.submit(compile_group, group, tokens, modes, self.device) for group in groups]
        done, late = wait(jobs, timeout=max(until_s - began_s, 0) if until_s < math.inf else None)
        for job in late:
            job.cancel()
        failed = [job for job in done if job.exception()]
        for job in failed[:1]:
            print(f"{len(failed)} of {len(jobs)} were not compiled ahead: {job.exception()}", flush=True)
        print(f"{len(done) - len(failed)} compiled in {time.monotonic() - began_s:.0f} s", flush=True)
