"""The end of a launch that has waited for its jobs: the sweeps are summed up, and their parents in MLflow closed."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from mxstudy.launch.job import Job
from mxstudy.launch.parents import Parents
from mxstudy.launch.say import say
from mxstudy.launch.sweep import end, summarise
from mxstudy.launch.worker import raising_on_signals
from mxstudy.studies import study_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_mirror import mirror_of


def conclude(jobs: list[Job], parents: Parents, behind: Iterable[Job], has_summary: bool) -> int:
    """Catch up for the jobs `behind`, sum up all jobs if they have a summary, and end their sweeps.

    Return 0; or, if a signal stops this, 128 + its number, with the sweeps ended as preempted.
    """
    try:
        with raising_on_signals():
            for job in behind:
                catch_up(job)
            summaries = summarise(jobs) if has_summary else {}
    except KeyboardInterrupt as stop:
        caught = signal.Signals[str(stop) or signal.SIGINT.name]
        say(f"stopped by {caught.name} after the last job; the same command, run again, does the rest")
        parents.wait()
        end(jobs, {}, "preempted")
        return 128 + caught
    parents.wait()
    end(jobs, summaries)
    return 0


def catch_up(job: Job) -> None:
    """Send a run's missing rows to its tracking server, which may have been away when the run ended."""
    follow = mirror_of(job.config, RunFolder(job.folder), job.label)
    behind = follow.catch_up() if follow else None
    behind = behind or study_of(job.config.study).tell_others(job.config, RunFolder(job.folder))
    if behind:
        say(f"tracking: {behind}; the journal has everything")
