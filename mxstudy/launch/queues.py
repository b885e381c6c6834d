"""The queues of submitted jobs: whether a job is still in its queue, how it ended, and how to cancel it.

Slurm is asked with squeue; for a job that has left the queue with scontrol, then with sacct if the cluster has it. The
queue of a launch on this machine is a process that holds QUEUE_LOCK and keeps QUEUE_LIST.
"""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from mxstudy.config.launcher import Slurm
from mxstudy.launch.ticket import Ticket
from mxstudy.reader import ConfigError

QUEUE_LOCK, QUEUE_LIST = "queue.lock", "queue.json"
PREEMPTED = "PreemptTime=2"  # the first digit of a year; it is None if the job is not preempted
PATIENCE_S = 60  # seconds to wait for a busy slurmctld


class QueueError(ConfigError):
    """Raised for a queue that cannot be asked; a guess about its jobs could train a run twice."""


class Queues:
    """The contents of the queues at one moment; each queue is asked at most once, and only when needed."""

    _has_accounts = True  # until sacct has failed

    def state(self, ticket: Ticket) -> str | None:
        """Return Slurm's word for the job's state (PENDING, ...), or None if it left its queue. Raises QueueError."""
        if isinstance(ticket.settings, Slurm):
            return self._slurm.get(ticket.job_id)
        return local_jobs(Path(ticket.launch)).get(ticket.job_id)

    def fate(self, ticket: Ticket) -> str | None:
        """Return how a job ended, for example 'OUT_OF_MEMORY, exit code 0:125', or None if Slurm does not know it.

        slurmctld knows for some minutes; after that only Slurm's accounts do, if a cluster has them.
        """
        if not isinstance(ticket.settings, Slurm):
            return None
        return self._remembered.get(ticket.job_id) or (self._accounts(ticket.job_id) if self._has_accounts else None)

    @cached_property
    def _remembered(self) -> dict[str, str]:
        ends = {}
        with suppress(QueueError):
            for line in ask("scontrol", "--oneliner", "show", "job").splitlines():
                job = dict(word.partition("=")[::2] for word in line.split())
                job_id = (
                    f"{job['ArrayJobId']}_{job.get('ArrayTaskId')}" if "ArrayJobId" in job else job.get("JobId", "")
                )
                if job.keys() >= {"JobState", "ExitCode"}:
                    ends[job_id] = f"{job['JobState']}, exit code {job['ExitCode']}"
        return ends

    def _accounts(self, job_id: str) -> str | None:
        try:
            output = ask("sacct", "--noheader", "-XP", "--format=State,ExitCode", "-j", job_id)
        except QueueError:
            self._has_accounts = False
            return None
        ends = re.findall(r"(\w+)[^|\n]*\|(\S+)", output)
        return f"{ends[-1][0]}, exit code {ends[-1][1]}" if ends else None

    @cached_property
    def _slurm(self) -> dict[str, str]:
        output = ask("squeue", "--me", "--noheader", "--array", "--format=%i %T")
        return dict(line.split(maxsplit=1) for line in output.splitlines() if line.strip())


def local_jobs(launch: Path) -> dict[str, str]:
    """Return the states of a launch's jobs by id, as its queue process lists them, or {} if that process is gone."""
    try:
        with (launch / QUEUE_LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        jobs: dict[str, str] = json.loads((launch / QUEUE_LIST).read_text())
        return jobs
    except FileNotFoundError:
        pass
    return {}


def is_being_preempted(job_id: str) -> bool:
    """Return whether Slurm has begun to preempt this job; called from within the job."""
    try:
        return PREEMPTED in ask("scontrol", "--oneliner", "show", "job", job_id)
    except QueueError:
        return False


def cancel(tickets: Sequence[Ticket]) -> None:
    """Cancel the Slurm jobs among the tickets; a queue on this machine reads the tickets itself. Raises QueueError."""
    ids = [ticket.job_id for ticket in tickets if isinstance(ticket.settings, Slurm)]
    for start in range(0, len(ids), 500):
        ask("scancel", *ids[start : start + 500])


def ask(*command: str) -> str:
    """Run a command of Slurm, and return its output. Raises QueueError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QueueError(f"{command[0]}: cannot be asked for the jobs in Slurm's queue ({error})") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise QueueError(f"{command[0]}: cannot be asked for the jobs in Slurm's queue ({words})")
    return done.stdout
