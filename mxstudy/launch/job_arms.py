"""Arms of the jobs of a launch: their names and colours among each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mxstudy.tracking.arms import Described, arms_of, describe, run_names

if TYPE_CHECKING:
    from mxstudy.launch.plan import Job


def with_arms(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs, each with the name and colour of its arm, and the arm's name with the job's seeds."""
    runs = descriptions(jobs)
    arms = arms_of(runs)
    named = zip(jobs, run_names(runs, arms), arms, strict=True)
    return [replace(job, arm=arm.name, name=name, color=arm.color) for job, name, arm in named]


def arm_names(jobs: Sequence[Job]) -> list[str]:
    """Return the name of each job's arm."""
    return [arm.name for arm in arms_of(descriptions(jobs))]


def descriptions(jobs: Sequence[Job]) -> list[Described]:
    return [describe(job.config, job.choices) for job in jobs]
