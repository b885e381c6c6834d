"""Arms of the jobs of a launch: their names and colours among each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mxstudy.launch.job import Job
from mxstudy.launch.labels import TITLE, shared_changes
from mxstudy.tracking.arms import Described, arms_of, describe, run_names

USED = ("checkpoint", "parent")  # keys that name a run which another kind of run uses


def with_arms(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with the names and colours of their arms, the arm's name with the seeds, and that in MLflow.

    In MLflow a run stands beside those of other launches, so its name there also says what all jobs here share. The
    name of an arm alone says its precision and norm itself, and the model that it uses if it has neither.
    """
    runs = descriptions(jobs)
    arms = arms_of(runs)
    said = shared_changes(jobs, named=(*TITLE, *USED) if len({arm.name for arm in arms}) == 1 else ())
    return [
        replace(job, arm=arm.name, name=name, shown_as=" ".join([name, *said]), color=arm.color)
        for job, name, arm in zip(jobs, run_names(runs, arms), arms, strict=True)
    ]


def arm_names(jobs: Sequence[Job]) -> list[str]:
    """Return the name of each job's arm."""
    return [arm.name for arm in arms_of(descriptions(jobs))]


def descriptions(jobs: Sequence[Job]) -> list[Described]:
    return [describe(job.config, job.choices) for job in jobs]
