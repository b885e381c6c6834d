"""From composed configs to runs: plan decides what is to be done, a launcher does it."""

from __future__ import annotations

from collections.abc import Callable

from mxstudy.launch import inline
from mxstudy.launch.plan import Composed, Job, plan

# By `kind` of conf/hydra/launcher/*.yaml: the jobs and the other settings there, to an exit code.
LAUNCHERS: dict[str, Callable[..., int]] = {"inline": inline.run}

__all__ = ["LAUNCHERS", "Composed", "Job", "plan"]
