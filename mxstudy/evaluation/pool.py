"""Score batches in several processes, each with the model on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextvars import ContextVar
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from mxstudy.evaluation.checkpoints import Trained, load
from mxstudy.evaluation.scorer import BatchRow, Found, Scorer
from mxstudy.reader import require
from mxstudy.train.runtime import configure_torch, gpus_there, share_of_cores

_own: ContextVar[Scorer] = ContextVar("own")  # set when a process of the pool starts


def devices_of(device: torch.device, processes: int) -> list[torch.device]:
    """Return a device for each process. Raises ConfigError if there are fewer GPUs than processes."""
    if device.type == "cpu":
        return [device] * processes
    there = gpus_there()
    require(processes <= there, f"processes: {processes} were asked for, but there are {there} GPUs")
    return [torch.device("cuda", number) for number in range(processes)]


class Pool(Scorer):
    """A Scorer that runs in one process per device; call `close` at the end."""

    def __init__(self, path: Path, trained: Trained, devices: Sequence[torch.device], tokens_per_batch: int) -> None:
        self.max_length, self.tokens_per_batch, self.truncated = trained.max_length, tokens_per_batch, 0
        context = get_context("spawn")
        queue = context.Queue()
        for device in devices:
            queue.put(device)
        arguments = (queue, path, trained, tokens_per_batch, len(devices))
        self.executor = ProcessPoolExecutor(len(devices), context, begin, arguments)

    def run_all(self, batches: Sequence[Sequence[BatchRow]]) -> Iterator[Found]:
        """Return each batch's result of `run`, in order of completion. Raises BrokenProcessPool if a process died."""
        futures = [self.executor.submit(run_one, batch) for batch in batches]
        return (future.result() for future in as_completed(futures))

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)


def begin(queue: Queue[torch.device], path: Path, trained: Trained, tokens_per_batch: int, processes: int) -> None:
    device = queue.get()
    configure_torch()
    torch.set_num_threads(share_of_cores(processes))
    _own.set(Scorer(load(path, trained, device), trained.max_length, tokens_per_batch))


def run_one(batch: Sequence[BatchRow]) -> Found:
    return _own.get().run(batch)
