"""The body of a job: train, or continue, the run of a folder, which holds all state.

A queue starts `work` in every task of the job; it uses no Hydra.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mxstudy.launch.queues import is_being_preempted
from mxstudy.launch.run_state import is_alive
from mxstudy.launch.ticket import is_cancelled
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of
from mxstudy.tracking.folder import STALE_AFTER_S, RunFolder, RunLocked
from mxstudy.tracking.provenance import provenance
from mxstudy.train.process_group import find_rank
from mxstudy.train.signals import leave_closed_terminal, stopping
from mxstudy.whole_files import replace_file

OF_THE_MACHINE = ("python", "torch", "torchao", "triton", "host", "gpu")


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks this process to leave; the message is the signal's name."""


@dataclass(frozen=True)
class Work:
    """The callable that submitit pickles: it holds only a path, so a requeued job does the same again."""

    folder: str

    def __call__(self) -> None:
        """Run as a task of a Slurm job, and exit with code 1 if the run failed, else 0."""
        folder = RunFolder(Path(self.folder))
        state = work(folder)
        if state == "preempted" and is_first_task():
            requeue(folder.status().reason or "")
        sys.exit(state == "failed")


def work(folder: RunFolder) -> str:
    """Train or resume the run, in each of the job's processes, and return its state."""
    if is_cancelled(folder):
        folder.update(state="cancelled")
        return "cancelled"
    state = attempt(folder, run_as_task)
    if state == "preempted" and is_cancelled(folder):
        folder.update(state="cancelled")
        return "cancelled"
    return state


def run_as_task(folder: RunFolder) -> str:
    """Run the study in a process that a queue has started, after its last owner is gone. Return the run's state."""
    if is_first_task():
        wait_for_the_last_owner(folder)
        note_the_machine(folder)
    return run_study(folder)


def run_study(folder: RunFolder) -> str:
    """Train or resume the run, and return its state."""
    config = folder.config()
    return study_of(config.study).run(config, folder, folder.provenance()["label"])


def attempt(folder: RunFolder, body: Callable[[RunFolder], str]) -> str:
    """Return the state that `body` returns. Exceptions are recorded in the run's folder; RunLocked is raised.

    A signal that comes before training has its own handlers ends `body`, and the state is "preempted".
    """
    try:
        with raising_on_signals():
            return body(folder)
    except RunLocked:
        raise
    except KeyboardInterrupt as stop:
        folder.update(state="preempted", reason=str(stop) or signal.SIGINT.name)
        return "preempted"
    except Exception as error:
        log, reason = folder.path / "error.log", f"{rank_prefix()}{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk may be the reason of the failure
            if not rank_prefix() or folder.status().state != "failed":  # another process has recorded the first failure
                folder.update(state="failed", reason=reason)
                replace_file(log, traceback.format_exc())
        print(f"failed: {reason}  ({log})", flush=True)  # last: who read the output may have left, as `head` does
        return "failed"


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise Stopped on a signal that asks the process to stop, unless training has set handlers of its own."""

    def leave(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            leave_closed_terminal()
        raise Stopped(signal.Signals(signum).name)

    before: dict[signal.Signals, Any] = {s: signal.signal(s, leave) for s in stopping()}
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def is_first_task() -> bool:
    return find_rank(os.environ).rank == 0


def rank_prefix() -> str:
    """Return 'rank N: ' if the job has several ranks, else ''."""
    own = find_rank(os.environ)
    return f"rank {own.rank}: " if own.size > 1 else ""


def wait_for_the_last_owner(folder: RunFolder) -> None:
    """Wait until the run's former process counts as dead, which on a lost node takes until its heartbeat is stale."""
    began_s = time.time()
    while is_alive(folder) and time.time() - began_s < 1.5 * STALE_AFTER_S:
        time.sleep(1)


def note_the_machine(folder: RunFolder) -> None:
    """Record this machine in provenance.json, which was written where the run was submitted.

    Commit and command stay as submitted; the keys OF_THE_MACHINE and the backend are this machine's.
    """
    here, about = provenance(), folder.provenance()
    noted = {key: here[key] for key in OF_THE_MACHINE}
    with suppress(ConfigError):  # a run that cannot run here fails later, with its reason
        config = folder.config()
        noted |= {"backend": backends} if (backends := study_of(config.study).backends(config)) else {}
    [about, *about.get("resumed", [])][-1].update(noted)
    folder.set_provenance(about)


def requeue(reason: str) -> None:
    """Requeue this job if the signal `reason` was SIGUSR2, Slurm's warning, or a SIGTERM that begins a preemption.

    Slurm itself handles a SIGTERM of `scontrol requeue` or `scancel`. When srun ends the tasks that a dead task left
    behind, the job is not requeued, because it could die of the same cause again.
    """
    job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job_id = "_".join(part for part in job if part) or os.environ["SLURM_JOB_ID"]
    if reason == signal.SIGUSR2.name or is_being_preempted(job_id):
        subprocess.run(["scontrol", "requeue", job_id], check=True, timeout=60)
