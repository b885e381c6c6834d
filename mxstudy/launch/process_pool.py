"""What makes hundreds of jobs quick to compose and to check: the cores share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextvars import ContextVar
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MANY = 64  # items that are worth a process: it starts in 0.05 s
MOST_PROCESSES = 16

# What a process of a pool is to do. It is forked along, not pickled: the function may know what cannot be.
_function: ContextVar[Callable[[Sequence[Any]], Iterable[Any]]] = ContextVar("function")


def map_in_processes(function: Callable[[Sequence[T]], Iterable[R]], items: Sequence[T]) -> list[R]:
    """Return list(function(items)): of many items a share for each core, in forked copies of this process."""
    shares = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(items) // MANY + 1)
    if shares < 2:
        return list(function(items))
    bounds = [len(items) * n // shares for n in range(shares + 1)]
    chunks = [items[start:stop] for start, stop in pairwise(bounds)]
    with ProcessPoolExecutor(shares, get_context("fork"), _function.set, (function,)) as pool:
        return [result for results in pool.map(_apply, chunks) for result in results]


def _apply(chunk: Sequence[Any]) -> list[Any]:
    return list(_function.get()(chunk))
