"""Map a function over hundreds of jobs on all cores, to compose and check them quickly."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextvars import ContextVar
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MANY = 64  # items per process at least, because to start one takes 0.05 s
MOST_PROCESSES = 16

# The function of a pool's processes. It is inherited by the fork, so it may hold objects that cannot be pickled.
_function: ContextVar[Callable[[Sequence[Any]], Iterable[Any]]] = ContextVar("function")


def begin_in_processes(function: Callable[[Sequence[T]], Iterable[R]], items: Sequence[T]) -> Callable[[], list[R]]:
    """Return a function that returns list(function(items)).

    Many items are split into one share per core, and forked processes begin to work on them at once. A few items are
    worked on in this process, when the returned function is called.
    """
    shares = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(items) // MANY + 1)
    if shares < 2:
        return lambda: list(function(items))
    bounds = [len(items) * n // shares for n in range(shares + 1)]
    pool = ProcessPoolExecutor(shares, get_context("fork"), _begin, (function,))
    shared_out = pool.map(_apply, [items[start:stop] for start, stop in pairwise(bounds)])

    def results() -> list[R]:
        with pool:
            return [result for share in shared_out for result in share]

    return results


def _begin(function: Callable[[Sequence[Any]], Iterable[Any]]) -> None:
    _function.set(function)
    gc.freeze()  # inherited objects outlive the process; a garbage collection of them takes a tenth of its time


def _apply(chunk: Sequence[Any]) -> list[Any]:
    return list(_function.get()(chunk))
