"""Lock files against other processes and threads. A lock ends with its process, even if that is killed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file within the block, after waiting until nobody else holds it. The file is created."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(file: int) -> bool:
    """Lock an open file until it is closed. Return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
