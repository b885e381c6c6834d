"""Set the number of threads of processes that share a CPU with others.

By default torch has a thread for every core. All threads must end an operation before the next one begins, so one
thread that waits for its core makes all wait: on four cores with other load, a rehearsal took 8 times as long with four
threads as with one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mxstudy.distributed import all_of
from mxstudy.launch.say import say
from mxstudy.train.runtime import cores, share_of_cores

VARIABLE = "OMP_NUM_THREADS"  # a user who sets it decides


class Threads(NamedTuple):
    """The number of threads of a process, and why it is not torch's default."""

    number: int
    why: str

    def line(self, remedy: str) -> str:
        """Return the line to be printed; `remedy`: what sets another number."""
        return f"threads: {self.number}, because {self.why}; {remedy} sets another number"


def threads_of(is_rehearsal: bool, processes: int) -> Threads | None:
    """Return the threads of each of these processes, which share this one's cores, or None if nothing must be set."""
    if VARIABLE in os.environ:
        return None
    if is_rehearsal:
        return Threads(1, "a rehearsal is too small for more")
    if processes > 1:
        return Threads(share_of_cores(processes), f"{processes} processes share {cores()} cores")
    return None


@contextmanager
def capped_threads(is_rehearsal: bool) -> Iterator[None]:
    """Set the threads of this process within the block, where torchrun or srun may have started others beside it.

    Afterwards they are what they were: a notebook's next run may be a real one.
    """
    before = torch.get_num_threads()
    mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
    processes = all_of(mine).count(mine)  # srun may have given each process cores of its own
    if threads := threads_of(is_rehearsal, processes):
        torch.set_num_threads(threads.number)
        say(threads.line(f"{VARIABLE}=N"))
    try:
        yield
    finally:
        torch.set_num_threads(before)
