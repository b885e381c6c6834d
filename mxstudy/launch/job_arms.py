"""Arms of the jobs of a launch: their names and colours among each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mxstudy.launch.job import Job
from mxstudy.launch.labels import changes, section_of
from mxstudy.tracking.arms import Described, arms_of, describe, run_names

USED = ("checkpoint", "parent")  # keys that name a run which another kind of run uses


def with_arms(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with the names and colours of their arms, the arm's name with the seeds, and that in MLflow."""
    runs = descriptions(jobs)
    arms = arms_of(runs)
    named = zip(jobs, run_names(runs, arms), arms, strict=True)
    jobs = [replace(job, arm=arm.name, name=name, shown_as=name, color=arm.color) for job, name, arm in named]
    return jobs if len(jobs) > 1 else [replace(job, shown_as=alone(job)) for job in jobs]


def alone(job: Job) -> str:
    """Return the name in MLflow of the only job of a launch: that of its arm, and what else the command changed.

    A model that is used is part of the arm's name if nothing else is.
    """
    said = [line for line in changes(job.overrides, job.config.study) if section_of(line) not in USED]
    return " ".join([job.name, *said])


def arm_names(jobs: Sequence[Job]) -> list[str]:
    """Return the name of each job's arm."""
    return [arm.name for arm in arms_of(descriptions(jobs))]


def descriptions(jobs: Sequence[Job]) -> list[Described]:
    return [describe(job.config, job.choices) for job in jobs]
