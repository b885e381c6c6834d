"""What becomes of a submitted job: is it still in its queue, how did it end, and how to end it.

Slurm is asked with squeue; of a job that has left the queue with scontrol, then with sacct, where a cluster has it. The
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
PREEMPTED = "PreemptTime=2"  # a year; else it is None
PATIENCE_S = 60  # with a busy slurmctld


class QueueError(ConfigError):
    """A queue that cannot be asked: then nobody knows what is in it, and a guess could train a run twice."""


class Queues:
    """What the queues hold at one moment: each is asked at most once, and only if it matters."""

    _has_accounts = True  # until sacct has failed

    def state(self, ticket: Ticket) -> str | None:
        """PENDING, RUNNING, ... in Slurm's words; None: its queue has it no more. Raises QueueError."""
        if isinstance(ticket.settings, Slurm):
            return self._slurm.get(ticket.job_id)
        return local_jobs(Path(ticket.launch)).get(ticket.job_id)

    def fate(self, ticket: Ticket) -> str | None:
        """How Slurm says that a job ended, 'OUT_OF_MEMORY, exit code 0:125'; None where nobody knows any more.

        For some minutes slurmctld knows; then only Slurm's accounts do, where a cluster has them.
        """
        if not isinstance(ticket.settings, Slurm):
            return None
        return self._remembered.get(ticket.job_id) or (self._accounts(ticket.job_id) if self._has_accounts else None)

    @cached_property
    def _remembered(self) -> dict[str, str]:
        found = {}
        with suppress(QueueError):
            for line in ask("scontrol", "--oneliner", "show", "job").splitlines():
                of = dict(word.partition("=")[::2] for word in line.split())
                job_id = f"{of['ArrayJobId']}_{of.get('ArrayTaskId')}" if "ArrayJobId" in of else of.get("JobId", "")
                if of.keys() >= {"JobState", "ExitCode"}:
                    found[job_id] = f"{of['JobState']}, exit code {of['ExitCode']}"
        return found

    def _accounts(self, job_id: str) -> str | None:
        try:
            said = ask("sacct", "--noheader", "-XP", "--format=State,ExitCode", "-j", job_id)
        except QueueError:
            self._has_accounts = False
            return None
        found = re.findall(r"(\w+)[^|\n]*\|(\S+)", said)
        return f"{found[-1][0]}, exit code {found[-1][1]}" if found else None

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


def is_being_preempted(job_id: str) -> bool:
    """Asked from within a job: has its grace time begun?"""
    try:
        return PREEMPTED in ask("scontrol", "--oneliner", "show", "job", job_id)
    except QueueError:
        return False


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
