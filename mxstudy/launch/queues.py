"""What becomes of a submitted job: is it still in its queue, how did it end, and how to end it.

Slurm is asked with squeue, then with sacct or, on a cluster without accounting, with scontrol. The queue of a launch
on this machine is a process that holds QUEUE_LOCK and keeps QUEUE_LIST.
"""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from mxstudy.config.launcher import Slurm
from mxstudy.launch.ticket import Ticket
from mxstudy.reader import ConfigError

QUEUE_LOCK, QUEUE_LIST = "queue.lock", "queue.json"
PATIENCE_S = 60  # with a busy slurmctld


class QueueError(ConfigError):
    """A queue that cannot be asked: then nobody knows what is in it, and a guess could train a run twice."""


class Queues:
    """What the queues hold at one moment: each is asked at most once, and only if it matters."""

    def state(self, ticket: Ticket) -> str | None:
        """PENDING, RUNNING, ... in Slurm's words; None: its queue has it no more. Raises QueueError."""
        if isinstance(ticket.settings, Slurm):
            return self._slurm.get(ticket.job_id)
        return local_jobs(Path(ticket.launch)).get(ticket.job_id)

    @cached_property
    def _slurm(self) -> dict[str, str]:
        said = ask("squeue", "--me", "--noheader", "--array", "--format=%i %T")
        return dict(line.split(maxsplit=1) for line in said.splitlines() if line.strip())


def local_jobs(launch: Path) -> dict[str, str]:
    """By job id, of the launch's queue process; a process that is gone has none."""
    try:
        with (launch / QUEUE_LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        jobs: dict[str, str] = json.loads((launch / QUEUE_LIST).read_text())
        return jobs
    except FileNotFoundError:
        pass
    return {}


def fate(ticket: Ticket) -> str | None:
    """How Slurm says that a job ended, 'OUT_OF_MEMORY, exit code 0:125'; None where nobody knows any more."""
    if not isinstance(ticket.settings, Slurm):
        return None
    for command, pattern in (
        (["sacct", "--noheader", "-XP", "--format=State,ExitCode", "-j", ticket.job_id], r"(\w+)[^|]*\|(\S+)"),
        (["scontrol", "-o", "show", "job", ticket.job_id], r"JobState=(\w+).*? ExitCode=(\S+)"),
    ):
        try:
            found = re.findall(pattern, ask(*command))
        except QueueError:
            continue
        if found:
            state, code = found[-1]
            return f"{state}, exit code {code}"
    return None


def slurm_state(job_id: str) -> str | None:
    """Of one job, asked from within it."""
    try:
        return ask("squeue", "--noheader", "--jobs", job_id, "--format=%T").strip() or None
    except QueueError:
        return None


def cancel(tickets: Sequence[Ticket]) -> None:
    """Ends those of them that are Slurm's; a queue on this machine looks at the tickets itself. Raises QueueError."""
    ids = [ticket.job_id for ticket in tickets if isinstance(ticket.settings, Slurm)]
    for start in range(0, len(ids), 500):
        ask("scancel", *ids[start : start + 500])


def ask(*command: str) -> str:
    """What a command of Slurm says. Raises QueueError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QueueError(f"{command[0]}: cannot be asked for the jobs in Slurm's queue ({error})") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise QueueError(f"{command[0]}: cannot be asked for the jobs in Slurm's queue ({words})")
    return done.stdout
