"""From composed configs to runs: plan decides what is to be done, a launcher does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxstudy.config.launcher import Inline, Launcher, Local, Slurm
from mxstudy.launch import estimate, inline, remote
from mxstudy.launch.composed import Composed
from mxstudy.launch.plan import Job, plan
from mxstudy.launch.ranks import check_started, gpus_per_node
from mxstudy.launch.sweep import different_roads, merged, say
from mxstudy.numerics.ranks import on_first_rank
from mxstudy.train.process_group import met
from mxstudy.train.runtime import planned_for

# By the type of their settings: planned jobs, and those settings, to an exit code.
LAUNCH: dict[type[Launcher], Callable[[list[Job], Any], int]] = {
    Inline: lambda jobs, _: inline.run(jobs),
    Local: remote.run,
    Slurm: remote.run,
}


def launch(compose: Callable[[], list[Composed]], launcher: Launcher) -> int:
    """Plans what was composed, and has it run, or says what it would cost; returns the exit code.

    Of several processes that were started together, by torchrun say, the first plans, and tells the others.
    """
    with met(), planned_for(gpus_per_node(launcher)):
        jobs = on_first_rank(lambda: plan(compose()))
        check_started(jobs)
        if sentence := different_roads(jobs):
            say(sentence)
        if any(job.config.dry_run for job in jobs):
            on_first_rank(lambda: estimate.show(jobs, launcher))
            return 0
        for line in merged(jobs):
            say(line)
        return LAUNCH[type(launcher)](jobs, launcher)
