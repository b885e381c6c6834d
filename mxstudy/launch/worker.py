"""What a job is: a run folder in, and its run trained, or the rest of it. All state is in the folder.

`work` is what a queue starts, in every task of the job; it knows no Hydra.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
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

STOPPING = (signal.SIGTERM, signal.SIGUSR2)
OF_THE_MACHINE = ("python", "torch", "torchao", "host", "gpu")


class Stopped(KeyboardInterrupt):
    """A signal asked this process to leave; the message is the signal's name."""


@dataclass(frozen=True)
class Work:
    """What submitit pickles: nothing but a path, so that a requeued job is the same once more."""

    folder: str

    def __call__(self) -> None:
        """Runs as a task of a Slurm job; the exit code is Slurm's to judge by."""
        folder = RunFolder(Path(self.folder))
        state = work(folder)
        if state == "preempted" and is_first():
            requeue(folder.status().reason or "")
        sys.exit(state == "failed")


def work(folder: RunFolder) -> str:
    """Trains or resumes the run, in each of the job's processes, and returns its state."""
    if is_cancelled(folder):
        folder.update(state="cancelled")
        return "cancelled"
    if is_first():
        wait_for_the_last_owner(folder)
        note_the_machine(folder)
    state = attempt(folder, folder.config(), folder.provenance()["label"])
    if state == "preempted" and is_cancelled(folder):
        folder.update(state="cancelled")
        return "cancelled"
    return state


def attempt(folder: RunFolder, config: Any, label: str) -> str:
    """Runs the study and returns the run's state. What it raises stays in the run's folder; RunLocked is passed on."""
    try:
        with raising_on_signals():
            return study_of(config.study).run(config, folder, label)
    except RunLocked:
        raise
    except KeyboardInterrupt as stop:
        folder.update(state="preempted", reason=str(stop) or signal.SIGINT.name)
        return "preempted"
    except Exception as error:
        log, reason = folder.path / "error.log", f"{who()}{type(error).__name__}: {error}"
        print(f"failed: {reason}  ({log})", flush=True)
        with suppress(OSError):  # a full disk may be the very reason
            if not who() or folder.status().state != "failed":  # else it echoes what another process died of
                folder.update(state="failed", reason=reason)
                log.write_text(traceback.format_exc())
        return "failed"


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Where training has not set handlers of its own, the signals that ask us to leave raise Stopped."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(signum).name)

    before: dict[signal.Signals, Any] = {s: signal.signal(s, leave) for s in STOPPING}
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def is_first() -> bool:
    return find_rank(os.environ).rank == 0


def who() -> str:
    place = find_rank(os.environ)
    return f"rank {place.rank}: " if place.size > 1 else ""


def wait_for_the_last_owner(folder: RunFolder) -> None:
    """A run that was requeued off a dead node seems alive until its heartbeat is stale."""
    began_s = time.time()
    while is_alive(folder) and time.time() - began_s < 1.5 * STALE_AFTER_S:
        time.sleep(1)


def note_the_machine(folder: RunFolder) -> None:
    """provenance.json was written where the run was submitted: commit and command are from there, this is from here."""
    here, about = provenance(), folder.provenance()
    noted = {key: here[key] for key in OF_THE_MACHINE}
    with suppress(ConfigError):  # what cannot run here fails when it is tried, and says why
        config = folder.config()
        noted |= {"backend": backends} if (backends := study_of(config.study).backends(config)) else {}
    [about, *about.get("resumed", [])][-1].update(noted)
    folder.set_provenance(about)


def requeue(told: str) -> None:
    """The job asks for its next turn after SIGUSR2, which is Slurm's warning, and after a SIGTERM if that begins the
    grace time of a preemption. Of `scontrol requeue` and `scancel` Slurm sees to itself, and where srun ends the tasks
    that a dead one has left behind, a next turn could die of the same.
    """
    job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job_id = "_".join(part for part in job if part) or os.environ["SLURM_JOB_ID"]
    if told == signal.SIGUSR2.name or is_being_preempted(job_id):
        subprocess.run(["scontrol", "requeue", job_id], check=True, timeout=60)
