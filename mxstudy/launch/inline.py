"""The inline launcher: run the jobs of a sweep one after another in this process."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mxstudy.distributed import is_first, on_first_rank, world_size
from mxstudy.launch.claiming import claim, differences, join
from mxstudy.launch.conclude import conclude
from mxstudy.launch.job import Job
from mxstudy.launch.parents import Parents
from mxstudy.launch.plan import compare, stored_runs
from mxstudy.launch.queues import Queues
from mxstudy.launch.say import say
from mxstudy.launch.sweep import end
from mxstudy.launch.threads import capped_threads
from mxstudy.launch.worker import attempt, run_study
from mxstudy.reader import ConfigError, one_line
from mxstudy.studies import study_of
from mxstudy.tracking.folder import DONE, RunFolder, RunLocked
from mxstudy.train.signals import received_signals

LEFT_ALONE = {"running": "another process runs it", "queued": "it waits in a queue"}


def run_jobs(jobs: list[Job]) -> int:
    """Run every job that is to be run, and print a line per job before it starts. Return the exit code.

    0: every job has finished or diverged; 1: a job failed or belongs to another process; 128 + signal: stopped by a
    signal. If several processes were started together, rank 0 decides which jobs run, and all ranks run them.
    """
    with capped_threads(is_rehearsal=all("debug" in job.choices for job in jobs)):
        return one_after_another(jobs)


def one_after_another(jobs: list[Job]) -> int:
    parents = Parents(jobs if is_first() else [])
    done, skipped = list[Job](), list[Job]()
    for number, planned in enumerate(jobs, start=1):
        job = on_first_rank(partial(claim_if_needed, planned, parents, f"[{number}/{len(jobs)}]"))
        is_ours = job.state in ("new", "resume")
        with received_signals() as received:
            state = run_one(job) if is_ours else job.state
        done.append(replace(job, state=state))
        if not is_ours and state in DONE:
            skipped.append(job)
        caught = on_first_rank(received.copy) if is_ours and state in DONE else []
        is_stopped = state == "preempted" or (bool(caught) and number < len(jobs))
        if is_stopped or (world_size() > 1 and is_ours and state not in DONE):  # the other ranks have left
            if is_first():
                parents.wait()
                end(done + jobs[number:], {})
            return stopped(done[-1], caught[0] if caught else signal_of(job), number, len(jobs)) if is_stopped else 1
    done = on_first_rank(lambda: [looked_at_again(job) for job in done])
    again = any(study_of(job.config.study).shows_again for job in skipped)
    # `skipped` not earlier: no training waits for a server that may be silent
    if is_first() and (code := conclude(done, parents, skipped, has_summary=len(done) > 1 or again)):
        return code
    left = [f"  {job.state}: {job.label}  {job.folder}" for job in done if job.state not in DONE]
    if left:
        say("\n".join([f"{len(left)} of {len(jobs)} jobs are not done:", *left]))
    return 1 if left else 0


def looked_at_again(job: Job) -> Job:
    """Return a job that was left to another process, with its end if it has ended by now."""
    with suppress(ConfigError):  # an unreadable status says nothing
        if job.state in LEFT_ALONE and (state := RunFolder(job.folder).status().state) in DONE:
            return replace(job, state=state)
    return job


def claim_if_needed(planned: Job, parents: Parents, number: str) -> Job:
    """Return the job with its current state, after claiming its folder if it is new or resumes.

    An error is said, and its job has failed; the others may still run.
    """
    job = planned
    try:
        job = compare(planned, stored_runs(planned), Queues())  # another process may have run it since planning
        say(f"{number} {job.label}  {job.folder}{remark(job)}")
        if job.state not in (*DONE, *LEFT_ALONE):
            try:
                claim(job)
                parents.tell(job)
            except RunLocked as error:
                job = left_alone(job, error)
        join(job)
        return job
    except ConfigError as error:  # the run has been damaged, or made unsuitable, since planning
        say(f"{number} {job.label}  failed: {error}")
    except OSError as error:  # for example a full disk: the other jobs may still find room
        say(f"failed: runs_dir: {job.folder} could not be made ({one_line(error)}); make room, or give another")
    return replace(job, state="failed")


def run_one(job: Job) -> str:
    """Train or resume one job, and return its state."""
    try:
        return attempt(RunFolder(job.folder), run_study)
    except RunLocked as error:
        return left_alone(job, error).state


def left_alone(job: Job, why: RunLocked) -> Job:
    say(f"left alone: {why}")
    return replace(job, state="running")


def signal_of(job: Job) -> signal.Signals:
    """Return the signal that stopped the job."""
    reason = RunFolder(job.folder).status().reason
    return next((s for s in signal.Signals if s.name == reason), signal.SIGTERM)


def stopped(job: Job, caught: signal.Signals, number: int, total: int) -> int:
    where = "after" if job.state in DONE else "from"
    command = "the same command" + (", with stale=rerun in place of rerun=true," if job.config.rerun else "")
    say(f"stopped by {caught.name} in job {number} of {total}; {command} continues {where} {job.folder}")
    return 128 + caught


def remark(job: Job) -> str:
    """Return the end of a job's line, which says why the job does not simply start."""
    if job.state == "new":
        return ""
    if job.state in LEFT_ALONE:
        return f"  left alone: {LEFT_ALONE[job.state]}"
    folder = RunFolder(job.folder)
    status = folder.status()
    if job.state == "resume":
        was = "killed" if status.state == "running" else status.state
        what = f"goes on: was {was} at step {status.step}" + (f" of {status.steps}" if status.steps else "")
    else:
        what = f"skipped: {job.state}"
    changed = differences(folder, job.config.study)
    return f"  {what}" + (f" ({changed})" if changed else "")
