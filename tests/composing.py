"""Run the command line up to the point where jobs would be launched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from omegaconf import OmegaConf

from mxstudy.cli import composing, through_hydra
from mxstudy.cli.main import main
from mxstudy.launch.composed import Composed
from mxstudy.launch.plan import validate
from mxstudy.reader import ConfigError

Jobs = Sequence[Sequence[str]]


def compose(*arguments: str, each_value_once: bool = False) -> list[Composed]:
    """Return the jobs of `python -m mxstudy ARGUMENTS`.

    With `each_value_once` it returns only enough of them to see every override once.
    """
    loader, master, jobs = handed_over(*arguments)
    return list(composing.compose(loader, master, covering(jobs) if each_value_once else jobs))


def compose_job(*overrides: str) -> Composed:
    """Compose one job without composing the primary config as well, which takes half the time."""
    loader, master, _ = an_experiment()
    (one,) = composing.compose(loader, master, [overrides])
    return one


def value(one: Composed, dotted: str) -> Any:
    """Return the value of a job's config at a dotted key."""
    return OmegaConf.select(OmegaConf.create(one.values), dotted)


def validated(composed: Composed) -> Any:
    """Return its config. Raises ConfigError."""
    (found,) = validate([composed])
    if isinstance(found, ConfigError):
        raise found
    return found.config


def handed_over(*arguments: str) -> tuple[Any, Any, Jobs]:
    """Return what Hydra hands to `launch_jobs` of mxstudy.cli: its loader, the primary config, the jobs' overrides."""
    taken: list[tuple[Any, Any, Jobs]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mxstudy", *arguments])
        patch.setattr(
            through_hydra, "launch_jobs", lambda loader, master, jobs, launcher: taken.append((loader, master, jobs))
        )
        main()
    return taken[0]


@functools.cache
def an_experiment() -> tuple[Any, Any, Jobs]:
    return handed_over("+experiment=quickstart")


def covering(jobs: Jobs) -> Jobs:
    seen: set[str] = set()
    chosen = []
    for job in jobs:
        if not seen.issuperset(job):
            chosen.append(job)
            seen.update(job)
    return chosen
