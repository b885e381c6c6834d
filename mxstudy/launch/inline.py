"""The jobs of a sweep, one after another in this process."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from mxstudy.launch.plan import DONE, Job, claim, compare, differences
from mxstudy.launch.sweep import begin, end, say, summarize
from mxstudy.studies import STUDIES
from mxstudy.tracking.folder import RunFolder, RunLocked
from mxstudy.tracking.mlflow import mirror_of

STOPPING = (signal.SIGTERM, signal.SIGUSR2)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to leave; the message is the signal's name."""


def run(jobs: list[Job]) -> int:
    """Runs what is to be run, a line a job before it starts. Returns the exit code.

    0: every job has finished or diverged; 1: one failed or is another process's; 128 + signal: stopped by a signal.
    """
    jobs, done = begin(jobs), []
    for number, planned in enumerate(jobs, start=1):
        job = compare(planned)  # another process may have run it since
        say(f"[{number}/{len(jobs)}] {job.label}  {job.folder}{remark(job)}")
        state = run_one(job) if job.state in ("new", "resume") else job.state
        if job.state in DONE:
            catch_up(job)
        done.append(replace(job, state=state))
        if state == "preempted":
            end(done + jobs[number:], {})
            return stopped(job, number, len(jobs))
    end(done, summarize(done) if len(done) > 1 else {})
    left = [f"  {job.state}: {job.label}  {job.folder}" for job in done if job.state not in DONE]
    if left:
        say("\n".join([f"{len(left)} of {len(jobs)} jobs are not done:", *left]))
    return 1 if left else 0


def run_one(job: Job) -> str:
    """Trains or resumes one job and returns its state."""
    try:
        return attempt(job, claim(job))
    except RunLocked as error:
        say(f"left alone: {error}")
        return "running"


def catch_up(job: Job) -> None:
    """A skipped run may have ended while its tracking server was away."""
    follow = mirror_of(job.config, RunFolder(job.folder), job.label)
    behind = follow.catch_up() if follow else None
    if behind:
        say(f"tracking: {behind}; the journal has everything")


def attempt(job: Job, folder: RunFolder) -> str:
    """What a study raises stays in the run's folder."""
    try:
        with raising_on_signals():
            return STUDIES[job.config.study].run(job.config, folder, job.label)
    except RunLocked:
        raise
    except KeyboardInterrupt as stop:
        folder.update(state="preempted", reason=str(stop) or signal.SIGINT.name)
        return "preempted"
    except Exception as error:
        log, reason = folder.path / "error.log", f"{type(error).__name__}: {error}"
        say(f"failed: {reason}  ({log})")
        with suppress(OSError):  # a full disk may be the very reason
            folder.update(state="failed", reason=reason)
            log.write_text(traceback.format_exc())
        return "failed"


def stopped(job: Job, number: int, total: int) -> int:
    reason = RunFolder(job.folder).status().reason or ""
    caught = next((s for s in signal.Signals if s.name in reason.split()), signal.SIGTERM)
    say(f"stopped by {caught.name} in job {number} of {total}; the same command goes on from {job.folder}")
    return 128 + caught


def remark(job: Job) -> str:
    """What follows a job's line: why it does not simply start."""
    if job.state == "new":
        return ""
    if job.state == "running":
        return "  left alone: another process runs it"
    folder = RunFolder(job.folder)
    status = folder.status()
    if job.state == "resume":
        was = "killed" if status.state == "running" else status.state
        return f"  goes on: was {was} at step {status.step} of {status.steps}"
    changed = differences(folder)
    return f"  skipped: {job.state}" + (f" ({changed})" if changed else "")


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Where training has not set handlers of its own, the signals that ask us to leave raise Stopped."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(signum).name)

    before: dict[signal.Signals, Any] = {s: signal.signal(s, leave) for s in STOPPING}
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
