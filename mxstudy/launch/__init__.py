"""From composed configs to runs: plan decides what is to be done, a launcher does it."""

from __future__ import annotations

from collections.abc import Callable

from mxstudy.launch.inline import run as run_inline
from mxstudy.launch.plan import Composed, Job, plan

# By `kind` of conf/hydra/launcher/*.yaml: the jobs and the other settings there, to an exit code.
LAUNCHERS: dict[str, Callable[..., int]] = {"inline": run_inline}

__all__ = ["LAUNCHERS", "Composed", "Job", "plan"]
