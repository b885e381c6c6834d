"""The local and Slurm launchers: submit all jobs to a queue at once, then return or wait for them."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mxstudy.config.launcher import Local, Slurm
from mxstudy.launch import local, queues, slurm
from mxstudy.launch.claiming import claim, join, origin
from mxstudy.launch.conclude import conclude
from mxstudy.launch.freeze import freeze_code, new_launch, one_at_a_time
from mxstudy.launch.job import Job
from mxstudy.launch.parents import Parents
from mxstudy.launch.plan import compare
from mxstudy.launch.processes import check_asked, tasks_per_node
from mxstudy.launch.queues import Queues
from mxstudy.launch.say import say
from mxstudy.launch.table import show, wait_for
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.reader import ConfigError, one_line
from mxstudy.tracking.folder import DONE, RunFolder, RunLocked, replaced
from mxstudy.tracking.found_runs import runs_by_fingerprint

Submit = Callable[..., Iterator[tuple[str, str]]]
NOT_SUBMITTED = "not submitted"
AT_ONCE = 8  # threads that write files; they mostly wait for the disk
SUBMIT: dict[type[Any], Submit] = {Local: local.submit, Slurm: slurm.submit}


def submit_jobs(jobs: list[Job], settings: Local | Slurm) -> int:
    """Submit the jobs that must run, and print where each job is. Return the exit code, which is 0 without `wait`."""
    check_asked(jobs, settings)
    runs_dir = Path(jobs[0].config.runs_dir)
    with one_at_a_time(runs_dir):
        now, stored = Queues(), runs_by_fingerprint(runs_dir)
        jobs = [compare(job, stored(job.fingerprint), now) for job in jobs]
        todo = [job for job in jobs if job.state in ("new", "resume")]
        claimed = claim_all(todo)
        parents = Parents(jobs)
        submit(claimed, settings)
    for job in todo:
        parents.tell(job)
    for job in jobs:
        if job.state != "new":  # a new folder already records who asked for it
            join(job)
    folders = [job.run for job in jobs]
    show(folders, [job.name for job in jobs])
    left = [job for job in jobs if job.state not in DONE]
    if left and not jobs[0].config.wait:
        say(f"{len(todo)} of {len(jobs)} jobs submitted; python -m mxstudy +launch=status shows their state")
        parents.wait()
        return 0
    ended = wait_for(folders)
    done = [replace(job, state=run.state) for job, run in zip(jobs, ended, strict=True)]
    code = conclude(done, parents, [job for job in done if job.state in DONE], has_summary=len(done) > 1)
    return code or int(any(job.state not in DONE for job in done))


class Claimed(NamedTuple):
    """A job with its folder; `undo` gives the folder up."""

    job: Job
    folder: RunFolder
    undo: Callable[[], None]


def claim_all(jobs: Sequence[Job]) -> list[Claimed]:
    """Make each job's folder with its config. Raises RunLocked, ConfigError or OSError; then none is claimed."""
    undo = [undo_of(job) for job in jobs]
    for kind in {job.config.study for job in jobs}:
        origin(kind)  # here, because else each thread would begin with it
    with ThreadPoolExecutor(AT_ONCE) as threads:
        claims = [threads.submit(claim, job) for job in jobs]
    each = zip(jobs, claims, undo, strict=True)
    claimed = [Claimed(job, own.result(), undo) for job, own, undo in each if own.exception() is None]
    try:
        for own in claims:
            own.result()  # raises the error of claiming
        for one in claimed:
            if one.job.state == "resume":  # a new folder is made in the state queued
                one.folder.update(state="queued", reason=None)
    except (RunLocked, ConfigError, OSError) as error:
        give_up(claimed, error)
        raise
    return claimed


def submit(claimed: Sequence[Claimed], settings: Local | Slurm) -> None:
    """Submit each job, and write its ticket. Raises ConfigError or OSError; what is in no queue is then given up.

    `check_asked` has found that the settings suit the jobs.
    """
    groups: dict[int, list[Claimed]] = defaultdict(list)
    for one in claimed:
        groups[tasks_per_node(one.job.config.study, settings)].append(one)
    left = {one.folder.path: one for one in claimed}
    tickets: list[Written] = []
    try:
        for tasks, group in groups.items():
            runs_dir = Path(group[0].job.config.runs_dir)
            launch, code = new_launch(runs_dir), freeze_code(runs_dir)
            queued = SUBMIT[type(settings)]([one.folder for one in group], settings, launch, code, tasks)
            with ThreadPoolExecutor(AT_ONCE) as threads:
                for (job_id, log), one in zip(queued, group, strict=True):
                    ticket = Ticket(
                        settings=settings,
                        job_id=job_id,
                        launch=str(launch),
                        log=log,
                        submitted_s=time.time(),
                        cwd=os.getcwd(),
                    )
                    folder = left.pop(one.folder.path).folder
                    tickets.append(Written(ticket, folder, threads.submit(ticket.write, folder)))
        for each in tickets:
            each.writing.result()  # raises the error of writing
    except (ConfigError, OSError) as error:
        give_up(left.values(), error)
        cancel_lost(tickets, error)
        raise


class Written(NamedTuple):
    """A ticket that is being written to a run's folder."""

    ticket: Ticket
    folder: RunFolder
    writing: Future[None]


def cancel_lost(tickets: Iterable[Written], error: Exception) -> None:
    """Cancel the jobs whose ticket could not be written, because the next launch would submit their runs again.

    A queue on this machine is told by the ticket alone, so its jobs go on. A line for each job says what became of it.
    """
    lost = [each for each in tickets if each.writing.exception() is not None]
    fate = "wait for its end before you launch the run again"
    if lost and isinstance(lost[0].ticket.settings, Slurm):
        try:
            queues.cancel([each.ticket for each in lost])
            fate = "it was cancelled"
            for each in lost:
                record(each.folder, error)
        except queues.QueueError as refused:
            fate = f"cancel it before you launch the run again ({refused})"
    for each in lost:
        say(f"{each.folder.path}: job {each.ticket.job_id} was submitted, but has no ticket; {fate}")


def give_up(claimed: Iterable[Claimed], error: Exception) -> None:
    """Record in each folder why it was not submitted, and undo the claim, as far as a full disk allows."""
    for one in claimed:
        record(one.folder, error)
        with suppress(OSError):
            one.undo()


def record(folder: RunFolder, error: Exception) -> None:
    with suppress(ConfigError, OSError):  # it must not hide the first error
        folder.update(state="failed", reason=f"{NOT_SUBMITTED}: {one_line(error)}")


def undo_of(job: Job) -> Callable[[], None]:
    """Return a function that undoes `claim`: it restores the earlier ticket, or the run that was replaced."""
    folder = RunFolder(job.folder)
    ticket = ticket_of(folder) if job.state == "resume" else None

    def undo() -> None:
        if ticket:
            ticket.write(folder)
        if job.replaces is not None:
            shutil.rmtree(job.folder)
            replaced(job.replaces)[-1].rename(job.replaces)

    return undo
