"""Start several processes together, on this machine, in place of torchrun or srun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import forked
import torch

from mxstudy.data.batches import Batches
from mxstudy.studies import study_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.train import watch


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def started(folder: Path, size: int, work: Callable[..., Any], *arguments: Any) -> Iterator[list[ForkServerProcess]]:
    """Run `work(*arguments)` in each of so many processes, whose results and outputs go to files in `folder`."""
    folder.mkdir(exist_ok=True, parents=True)
    port, context = free_port(), forked.context()
    gang = [context.Process(target=_rank, args=(folder, rank, size, port, work, arguments)) for rank in range(size)]
    for process in gang:
        process.start()
    try:
        yield gang
    finally:
        for process in gang:
            process.kill()
            process.join()


def together(folder: Path, size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `work(*arguments)` returned in each rank. All must end well."""
    with started(folder, size, work, *arguments) as gang:
        codes = ended(gang)
        assert codes == [0] * size, said(folder)
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(size)]


def ended(gang: list[ForkServerProcess], timeout_s: float = 270.0) -> list[int | None]:
    """Return the exit codes, and None for a process that still runs then."""
    until_s = time.monotonic() + timeout_s
    for process in gang:
        process.join(max(0.0, until_s - time.monotonic()))
    return [process.exitcode for process in gang]


def said(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("output-*")))


def _rank(folder: Path, rank: int, size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    forked.leave_imports_alone()
    with (folder / f"output-{rank}").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    torch.set_num_threads(1)
    torch.save(work(*arguments), folder / f"result-{rank}")


# ------------------------------------------------------------------------------------------------------ a run


def killed_after(run: Path, step: int, folder: Path) -> Path:
    """Return a copy of a run, as it was after the checkpoint of that step."""
    copy = folder / "run"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").iterdir():
        if path.name > f"step_{step:08d}":
            shutil.rmtree(path)
    RunFolder(copy).update(state="running", step=step)
    return copy


def train(path: Path, mishap: str = "", patience_s: float | None = None) -> str:
    """Train the run of that folder as a launcher does in each process, and return its state.

    `mishap` is what happens to rank 1, or to rank 0 with `first` in it, as it fetches its batch of step 5. `patience_s`
    is how long the ranks wait for one without a heartbeat.
    """
    folder, rank = RunFolder(path), int(os.environ["RANK"])
    if patience_s:
        watch.BEAT_S, watch.DEAD_AFTER_S, watch.GRACE_S = 0.1, patience_s, 1.0
    if mishap and rank == (0 if "first" in mishap else 1):
        befall(mishap)
    try:
        return study_of("pretrain").run(folder.config(), folder, "test")
    except Exception as error:
        (folder.path / "error.log").write_text(traceback.format_exc())
        folder.update(state="failed", reason=f"{type(error).__name__}: {error}")
        raise


def befall(mishap: str) -> None:
    fetch = Batches.train

    def train(self: Batches, step: int, start: int = 0, stop: int | None = None) -> Any:
        if "sleeps" in mishap:
            time.sleep(0.2)
        elif step == 5 and "raises" in mishap:
            raise ValueError("a bad batch")
        elif step == 5:
            os.kill(os.getpid(), getattr(signal, mishap.split()[-1]))
        return fetch(self, step, start, stop)

    Batches.train = train  # type: ignore[method-assign]
