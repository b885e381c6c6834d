"""The start of a launch: plan the composed jobs, then hand them to the launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mxstudy.config.launcher import Inline, Launcher, Local, Slurm
from mxstudy.distributed import on_first_rank
from mxstudy.launch import estimate, inline, remote
from mxstudy.launch.composed import Composed
from mxstudy.launch.job import Job
from mxstudy.launch.plan import plan
from mxstudy.launch.processes import check_started, gpus_per_node
from mxstudy.launch.say import say
from mxstudy.launch.sweep import backends_sentence, merged
from mxstudy.train.process_group import met
from mxstudy.train.runtime import planned_for

# From the type of the launcher's settings to the function that takes planned jobs and settings and returns an exit
# code.
LAUNCH: dict[type[Launcher], Callable[[list[Job], Any], int]] = {
    Inline: lambda jobs, _: inline.run_jobs(jobs),
    Local: remote.submit_jobs,
    Slurm: remote.submit_jobs,
}


class Launched(NamedTuple):
    """The result of a launch: its exit code, and the jobs as planned."""

    code: int
    jobs: list[Job]


def launch(compose: Callable[[], list[Composed]], launcher: Launcher) -> Launched:
    """Plan the composed jobs, then run them or print their cost.

    If several processes were started together, for example by torchrun, rank 0 plans and sends the plan to the others.
    """
    with met(), planned_for(gpus_per_node(launcher)):
        jobs = on_first_rank(lambda: plan(with_notes_printed(compose())))
        check_started(jobs)
        if sentence := backends_sentence(jobs):
            say(sentence)
        if any(job.config.dry_run for job in jobs):
            on_first_rank(lambda: estimate.show(jobs, launcher))
            return Launched(0, jobs)
        for line in merged(jobs):
            say(line)
        return Launched(LAUNCH[type(launcher)](jobs, launcher), jobs)


def with_notes_printed(composed: list[Composed]) -> list[Composed]:
    """Print the notes of the composed jobs, each once, and return the jobs."""
    for note in dict.fromkeys(note for one in composed for note in one.notes):
        say(note)
    return composed
