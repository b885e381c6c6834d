"""job.json: how a run was handed to a queue, written by whoever submitted it; the job itself only reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from mxstudy.config.launcher import Local, Slurm
from mxstudy.reader import ConfigError, read
from mxstudy.tracking.folder import RunFolder, replace_file

NAME = "job.json"


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """`launch`: the folder of the launch, with its code, logs and what its queue needs. `log`: what the job prints.

    `submitted_s`: a unix time, for whoever reads the file. `cwd`: where it was submitted from, which is what the paths
    in its config are relative to.
    `cancelled`: somebody has asked for its end, whatever its queue or status says meanwhile.
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
    """None for a run that no queue has been given."""
    path = folder.path / NAME
    try:
        ticket: Ticket = read(Ticket, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); delete it if its job is gone") from None
    return ticket


def is_cancelled(folder: RunFolder) -> bool:
    ticket = ticket_of(folder)
    return ticket is not None and ticket.cancelled


def drop_ticket(folder: RunFolder) -> None:
    """The run is somebody else's from now on."""
    (folder.path / NAME).unlink(missing_ok=True)
