"""Run `python -m mxstudy ARGUMENTS` in a process of its own, and disturb it once, at a chosen moment.

A moment is a share of what the same command does undisturbed: a share of its writes to files, which is the same moment
whatever the speed of the machine, or a share of its seconds, which also meets what no Python code sees.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from mxstudy.studies import MODULES

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
FULL_DISK = "full disk"
FILLER = "filler"  # the file that fills the disk
PATIENCE_S = 150.0  # a longer command hangs: at its end a run waits up to a minute for a server
PRELOAD = ["mlflow", "mxstudy.cli.main", "mxstudy.launch.start", "torch._inductor", "benchmarks.disturbed"]
PRELOAD += [*MODULES.values(), "mxstudy.studies.pretrain.run", "mxstudy.students.train"]


@dataclass(frozen=True)
class Disturbance:
    """A disturbance: a signal or FULL_DISK, after the share `at` of the undisturbed command's writes or seconds.

    A signal after a share of the seconds goes to one process: the one at the share `who` of the processes, by age.
    """

    what: str
    at: float
    of: Literal["writes", "seconds"]
    who: float


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (None if it hung and was killed), its output, and what it took.

    `disturbed` says whether it was still running when it was to be disturbed. `writes` is 0 if it was killed.
    """

    code: int | None
    said: str
    seconds: float
    writes: int
    disturbed: bool


def run(
    folder: Path,
    arguments: tuple[str, ...],
    disturbance: Disturbance | None = None,
    undisturbed: Ended | None = None,
) -> Ended:
    """Run the command in `folder`, disturbed at a moment that is a share of `undisturbed`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    output, counted, met = (folder.with_name(f"{folder.name}.{name}") for name in ("output", "writes", "disturbed"))
    for notes in (output, counted, met):  # beside the folder, because its disk may be full
        notes.unlink(missing_ok=True)
    at_write = 0
    if disturbance and undisturbed and disturbance.of == "writes":
        at_write = 1 + int(disturbance.at * undisturbed.writes)
    what = disturbance.what if disturbance else ""
    process = context.Process(target=in_the_child, args=(folder, arguments, output, counted, met, what, at_write))
    began_s = time.monotonic()
    process.start()
    if disturbance and undisturbed and not at_write:
        process.join(disturbance.at * undisturbed.seconds)
        victims = processes_in(folder)
        if process.is_alive() and victims:
            met.touch()
            with suppress(ProcessLookupError):
                disturb(folder, what, victims[int(disturbance.who * len(victims))].pid)
    process.join(PATIENCE_S)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    writes = int(counted.read_text()) if counted.exists() else 0
    said = output.read_text(errors="replace") if output.exists() else ""
    return Ended(code, said, time.monotonic() - began_s, writes, met.exists())


def in_the_child(
    folder: Path, arguments: tuple[str, ...], output: Path, counted: Path, met: Path, what: str, at_write: int
) -> None:
    """Run the command line. At its write number `at_write`, if not 0, do `what`, which makes the file `met`.

    Then write the number of writes to `counted`.
    """
    from mxstudy.cli.main import main

    become_command(folder, arguments, output)

    def do(number: int) -> None:
        if number == at_write:
            os.close(os.open(met, os.O_CREAT))  # os.open is not counted as a write
            disturb(folder, what, os.getpid())

    writes = count_writes(do)
    try:
        main()
    finally:
        counted.write_text(str(writes[0]))


def become_command(folder: Path, arguments: Sequence[str], output: Path) -> None:
    """Turn this process, forked from a server, into one that a command line has started in `folder`."""
    gc.freeze()  # a collector that looks through imported modules copies their pages
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))
    sys.argv = ["mxstudy", *arguments]
    torch.set_num_threads(1)


def audit_os_write() -> Callable[[int, bytes], int]:
    """Give os.write the audit event that Python has for other writes, and return the original function."""
    write = os.write

    def audited(file: int, data: bytes) -> int:
        sys.audit("os.write", file, data)
        return write(file, data)

    os.write = audited  # type: ignore[assignment]
    return write


def count_writes(do: Callable[[int], None]) -> list[int]:
    """Call `do` with the number of each write from now on, before it happens. Return a list with the last number.

    A write is a file that is opened to be written, renamed or deleted, a new folder, or an os.write.
    """
    count = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if opened or event in ("os.rename", "os.mkdir", "os.remove", "shutil.rmtree", "os.write"):
            count[0] += 1
            do(count[0])

    audit_os_write()
    sys.addaudithook(hook)
    return count


def disturb(folder: Path, what: str, process: int) -> None:
    if what == FULL_DISK:
        fill(folder)
    else:
        os.kill(process, getattr(signal, what))


def fill(folder: Path) -> None:
    """Fill the folder's disk, without a write that is counted."""
    descriptor = os.open(folder / FILLER, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, 2**16)
    with suppress(OSError):
        while True:
            os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, io.DEFAULT_BUFFER_SIZE // 2)
    os.close(descriptor)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in this folder, oldest first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()) == folder:
                found.append(process)
    return sorted(found, key=psutil.Process.create_time)
