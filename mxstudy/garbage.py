"""Work without Python's search for cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn the search for cyclic garbage off within the block, for work that makes many objects and no cycles.

    Each search visits every object of the process, so that it takes longer the more there are.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
