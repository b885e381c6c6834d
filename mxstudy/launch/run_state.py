"""The actual state of a run: its status file, checked against its heartbeat, its lock and its queue."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from mxstudy.config.launcher import Slurm
from mxstudy.launch.queues import QueueError, Queues
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.tracking.folder import DONE, RunFolder, Status

ENDED = (*DONE, "failed", "cancelled")


@dataclass(frozen=True)
class RunState:
    """`state`, `reason`: the actual ones; `status`: what the run wrote last. `waits`: its queue will still start it."""

    folder: RunFolder
    status: Status
    ticket: Ticket | None
    state: str
    reason: str | None
    waits: bool = False

    @property
    def in_flight(self) -> bool:
        """Return whether a process runs it or its queue will start it, so that no other process may."""
        return self.waits or self.state == "running"


def observe(folder: RunFolder, queues: Queues) -> RunState:
    """Return the run's actual state. Raises QueueError if its queue must be asked and cannot be."""
    ticket = ticket_of(folder)
    has_ended = folder.status().state in ENDED
    queued = queues.state(ticket) if ticket and not has_ended else None
    status = folder.status()  # read after asking the queue: a run that has left it has written its last status
    if status.state in ENDED:
        return RunState(folder, status, ticket, status.state, status.reason)
    if ticket and queued:
        return in_its_queue(folder, status, ticket, waits=queued == "PENDING")
    if not (ticket and isinstance(ticket.settings, Slurm)) and is_alive(folder):
        return RunState(folder, status, ticket, "running", status.reason)
    state, reason = state_without_process(status, ticket, queues)
    return RunState(folder, status, ticket, state, reason)


def look(folder: RunFolder, queues: Queues) -> RunState:
    """Return the run's state as `observe` does or, if its queue cannot be asked, from heartbeat and lock."""
    try:
        return observe(folder, queues)
    except QueueError:
        status, ticket = folder.status(), ticket_of(folder)
        if status.state != "running" or is_alive(folder):
            return RunState(folder, status, ticket, status.state, status.reason, waits=status.state != "running")
        return RunState(folder, status, ticket, "failed", "no heartbeat, and its queue cannot be asked from here")


def in_its_queue(folder: RunFolder, status: Status, ticket: Ticket, waits: bool) -> RunState:
    """Return the state of a run in a queue: running, waiting to start, or waiting to continue."""
    if not waits:
        return RunState(folder, status, ticket, "running", None)
    if status.state == "queued":
        return RunState(folder, status, ticket, "queued", None, waits=True)
    why = status.reason if status.state == "preempted" else "killed"
    return RunState(folder, status, ticket, "preempted", f"{why}; waits to continue", waits=True)


def state_without_process(status: Status, ticket: Ticket | None, queues: Queues) -> tuple[str, str | None]:
    """Return the state of a run that has no process and is in no queue, and the reason."""
    if ticket and ticket.cancelled:
        return "cancelled", None
    if status.state == "preempted":
        return "preempted", status.reason
    if ticket is None:
        return ("failed", "killed without a message") if status.state == "running" else (status.state, status.reason)
    end = queues.fate(ticket)
    if end and end.startswith("CANCELLED"):
        return "cancelled", end
    what = "died without a message" if status.state == "running" else "left the queue before it began"
    return "failed", f"{what} ({end}; {ticket.log})" if end else f"{what} ({ticket.log})"


def is_alive(folder: RunFolder) -> bool:
    """Return whether a process runs it: judged by its lock on this machine, by its heartbeat on another one."""
    status = folder.status()
    if status.state != "running":
        return False
    if status.host != socket.gethostname():
        return not status.is_stale(time.time())
    return folder.is_locked()
