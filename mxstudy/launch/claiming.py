"""Claim a planned job's run: make its folder, or take over that of an unfinished run, and set an earlier run aside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mxstudy.launch.job import Job
from mxstudy.launch.queues import Queues
from mxstudy.launch.run_state import observe
from mxstudy.launch.ticket import drop_ticket, ticket_of
from mxstudy.reader import ConfigError, changed
from mxstudy.tracking.code import code_of
from mxstudy.tracking.folder import REPLACED, RunFolder, RunLocked, number_of, replaced
from mxstudy.tracking.memberships import Membership
from mxstudy.tracking.provenance import provenance


def origin(study: str) -> dict[str, Any]:
    """Return where a run of that kind comes from if it begins now; slow only at the first call."""
    return provenance() | code_of(study)


def claim(job: Job) -> RunFolder:
    """Make and return the folder of a job that is about to run; a run that it replaces goes to FOLDER.old-N.

    Raises RunLocked if another process made the folder first, or runs the run that would be replaced.
    """
    about = origin(job.config.study) | ({"backend": job.backend} if job.backend else {})
    if job.state == "resume":
        folder = RunFolder(job.folder)
        folder.go_on(job.config, about)
        drop_ticket(folder)  # the last step: without a ticket, nobody knows the run's queue
        return folder
    config, asked = job.config, list[Membership]()
    about |= {"overrides": list(job.overrides), "choices": job.choices, "label": job.label}
    about |= {"baseline": dict(job.config.baseline), "arm": job.arm, "name": job.shown_as, "color": job.color}
    with ExitStack() as stack:
        if job.replaces is not None:
            before = RunFolder(job.replaces)
            config = changed(config, experiment=before.path.parent.name)
            asked = [*before.memberships(), job.membership]
            stack.enter_context(set_aside(before))
        try:
            return RunFolder.create(job.folder, config, job.fingerprint, about, asked)
        except ConfigError as error:
            raise RunLocked(str(error)) from None


def join(job: Job) -> None:
    """Record in the run's folder that this sweep asked for the run, whoever trains or has trained it."""
    RunFolder(job.folder).join(job.membership)


@contextmanager
def set_aside(run: RunFolder) -> Iterator[Path]:
    """Rename the folder of a run to FOLDER.old-N, and yield its new path; readers find it until the rerun has ended.

    It is locked while the block makes the rerun's folder, so that nobody puts it back. Raises RunLocked if a process
    runs it, or a queue is about to.
    """
    seen = observe(run, Queues())
    with run.lock():
        if seen.in_flight or run.status() != seen.status or ticket_of(run) != seen.ticket:  # checked again, locked
            raise RunLocked(f"{run.path}: another process has just taken it; wait for it, or stop it")
        number = max(map(number_of, replaced(run.path)), default=0) + 1
        yield run.path.rename(run.path.with_name(f"{run.path.name}{REPLACED}{number}"))


def differences(folder: RunFolder, study: str) -> str:
    """Return the differences in commit, code, torch and GPU between that run and one started now, '' if none."""
    about, today = folder.provenance(), origin(study)
    then = [about, *about.get("resumed", [])][-1] | {"code": folder.code()}
    differ = [key for key in ("commit", "code", "torch", "gpu") if then.get(key) != today.get(key)]
    return ", ".join(f"{key} {then.get(key)} then, {today.get(key)} now" for key in differ)
