"""job.json: how a run was submitted to a queue; the submitting process writes it, and the job only reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from mxstudy.config.launcher import Local, Slurm
from mxstudy.small_files import read_if_there
from mxstudy.tracking.folder import RunFolder
from mxstudy.whole_files import replace_file

NAME = "job.json"


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The queue and the job of a run. `launch`: the launch's folder; `log`: the file with the job's output.

    The launch's folder holds the logs and its queue's files. `submitted_s`: Unix time, for readers of the file. `cwd`:
    the directory that the run was submitted from; paths in its config are relative to it. `cancelled`: somebody has
    cancelled the run, whatever its queue or status still says.
    """

    settings: Local | Slurm
    job_id: str
    launch: str
    log: str
    submitted_s: float
    cwd: str = "."
    cancelled: bool = False

    def write(self, folder: RunFolder) -> None:
        replace_file(folder.path / NAME, json.dumps(asdict(self), indent=2))


def ticket_of(folder: RunFolder) -> Ticket | None:
    """Return the run's ticket, or None if it was never submitted to a queue. Raises ConfigError if it is unreadable."""
    ticket: Ticket | None = read_if_there(Ticket, folder.path / NAME, "delete it if its job is gone")
    return ticket


def is_cancelled(folder: RunFolder) -> bool:
    ticket = ticket_of(folder)
    return ticket is not None and ticket.cancelled


def drop_ticket(folder: RunFolder) -> None:
    """Delete the ticket: from now on the run belongs to no queue."""
    (folder.path / NAME).unlink(missing_ok=True)
