"""From composed configs to runs: plan decides what is to be done, a launcher does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxstudy.config.launcher import Inline, Launcher, Local, Slurm
from mxstudy.launch import inline, remote
from mxstudy.launch.plan import Composed, Job, plan

# By the type of their settings: planned jobs, and those settings, to an exit code.
LAUNCH: dict[type[Launcher], Callable[[list[Job], Any], int]] = {
    Inline: lambda jobs, _: inline.run(jobs),
    Local: remote.run,
    Slurm: remote.run,
}

__all__ = ["LAUNCH", "Composed", "Job", "plan"]
