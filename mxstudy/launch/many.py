"""What makes hundreds of jobs quick to compose and to check: the cores share them, and a file is read once."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MANY = 64  # items that are worth a process: it starts in 0.05 s
MOST_PROCESSES = 16

_function: Callable[[Sequence[Any]], Iterable[Any]]


def spread(function: Callable[[Sequence[T]], Iterable[R]], items: Sequence[T]) -> list[R]:
    """list(function(items)): of many items a share for each core, in forked copies of this process."""
    global _function
    shares = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(items) // MANY + 1)
    if shares < 2:
        return list(function(items))
    _function = function  # forked along: it may know what cannot be pickled
    bounds = [len(items) * n // shares for n in range(shares + 1)]
    chunks = [items[start:stop] for start, stop in pairwise(bounds)]
    with ProcessPoolExecutor(shares, mp_context=get_context("fork")) as pool:
        return [result for results in pool.map(_apply, chunks) for result in results]


def _apply(chunk: Sequence[Any]) -> list[Any]:
    return list(_function(chunk))


class Remembered:
    """Hydra's repository of configs, which copies all it has and reads every file anew for each job; this does not."""

    def __init__(self, repository: Any) -> None:
        self.repository = repository
        self.loaded: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.repository, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return self

    def initialize_sources(self, config_search_path: Any) -> None:
        self.loaded.clear()
        self.repository.initialize_sources(config_search_path)

    def load_config(self, config_path: str) -> Any:
        """A copy: composing changes it."""
        if config_path not in self.loaded:
            self.loaded[config_path] = self.repository.load_config(config_path=config_path)
        return copy.deepcopy(self.loaded[config_path])
