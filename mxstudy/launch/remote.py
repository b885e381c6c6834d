"""The local and Slurm launchers: submit all jobs to a queue at once, then return or wait for them."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mxstudy.config.launcher import Local, Slurm
from mxstudy.launch import local, slurm
from mxstudy.launch.freeze import freeze_code, new_launch, one_at_a_time
from mxstudy.launch.inline import catch_up
from mxstudy.launch.parents import Parents
from mxstudy.launch.plan import Job, claim, compare, join, origin
from mxstudy.launch.processes import check_asked, tasks_per_node
from mxstudy.launch.queues import Queues
from mxstudy.launch.say import say
from mxstudy.launch.sweep import end, summarise
from mxstudy.launch.table import show, wait_for
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import DONE, RunFolder, replaced, runs_by_fingerprint

Submit = Callable[..., Iterator[tuple[str, str]]]
NOT_SUBMITTED = "not submitted"
AT_ONCE = 8  # threads that write files; they mostly wait for the disk
SUBMIT: dict[type[Any], Submit] = {Local: local.submit, Slurm: slurm.submit}


def submit_jobs(jobs: list[Job], settings: Local | Slurm) -> int:
    """Submit the jobs that must run, and print where each job is. Return the exit code, which is 0 without `wait`."""
    check_asked(jobs, settings)
    runs_dir = Path(jobs[0].config.runs_dir)
    with one_at_a_time(runs_dir):
        queues, stored = Queues(), runs_by_fingerprint(runs_dir)
        jobs = [compare(job, stored(job.fingerprint), queues) for job in jobs]
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
    for job in done:
        if job.state in DONE:
            catch_up(job)
    parents.wait()
    end(done, summarise(done) if len(done) > 1 else {})
    return int(any(job.state not in DONE for job in done))


class Claimed(NamedTuple):
    """A job with its folder; `undo` gives the folder up."""

    job: Job
    folder: RunFolder
    undo: Callable[[], None]


def claim_all(jobs: Sequence[Job]) -> list[Claimed]:
    """Make each job's folder with its config. Raises RunLocked."""
    undo = [put_back(job) for job in jobs]
    for kind in {job.config.study for job in jobs}:
        origin(kind)  # here, because else each thread would begin with it
    with ThreadPoolExecutor(AT_ONCE) as threads:
        folders = list(threads.map(claim, jobs))
    for job, folder in zip(jobs, folders, strict=True):
        if job.state == "resume":  # a new folder is made in the state queued
            folder.update(state="queued", reason=None)
    return [Claimed(*each) for each in zip(jobs, folders, undo, strict=True)]


def submit(claimed: Sequence[Claimed], settings: Local | Slurm) -> None:
    """Submit each job, and write its ticket. Raises ConfigError."""
    groups: dict[int, list[Claimed]] = defaultdict(list)
    for one in claimed:
        groups[tasks_per_node(one.job.config.study, settings)].append(one)
    left = [one for group in groups.values() for one in group]
    for tasks, group in groups.items():
        runs_dir = Path(group[0].job.config.runs_dir)
        launch, code = new_launch(runs_dir), freeze_code(runs_dir)
        queued = SUBMIT[type(settings)]([one.folder for one in group], settings, launch, code, tasks)
        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                written = []
                for job_id, log in queued:
                    now_s = time.time()
                    ticket = Ticket(
                        settings=settings,
                        job_id=job_id,
                        launch=str(launch),
                        log=log,
                        submitted_s=now_s,
                        cwd=os.getcwd(),
                    )
                    written.append(threads.submit(ticket.write, left.pop(0).folder))
            for each in written:
                each.result()  # raises the error of writing
        except ConfigError as error:
            for one in left:
                one.folder.update(state="failed", reason=f"{NOT_SUBMITTED}: {error}")
                one.undo()
            raise


def put_back(job: Job) -> Callable[[], None]:
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
