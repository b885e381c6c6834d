"""The label of each job of a launch: the words by which a user tells it from the others."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from mxstudy.config.run import STUDIES, Run
from mxstudy.launch.composed import Composed
from mxstudy.launch.job import Job

TITLE = ("precision", "norm")  # groups that a title begins with, as the command or the experiment chose them
STARTED = ("experiment", "sweep", "debug", "hydra")  # sections and groups that are no part of a run's config
SHOWN = 60  # characters of an override


def labels(composed: list[Composed]) -> list[str]:
    """Return for each job the overrides that not all jobs share, or its title if it has none."""
    keys = varying([job.overrides for job in composed])
    return [
        " ".join(line for key, line in by_key(job.overrides).items() if key in keys) or title(job) for job in composed
    ]


def title(job: Composed) -> str:
    """Return the precision and the norm of a job, and what else its command changes; the experiment if it has none."""
    chosen = [f"{group}={job.choices[group]}" for group in TITLE if group in job.choices]
    values = [line for line in job.overrides if line.lstrip("+").startswith(tuple(f"{group}." for group in TITLE))]
    study = str(job.values.get("study")) if isinstance(job.values, dict) else ""
    words = [*(choice for choice in chosen if not choice.endswith("=as_trained")), *values]
    return " ".join([*words, *changes(job.overrides, study)]) or job.choices.get("experiment", "unnamed")


def changes(overrides: Sequence[str], study: str, named: Collection[str] = TITLE) -> list[str]:
    """Return the overrides that may change a run's numbers, without those of the sections in `named`.

    The others say what begins, where its files are, how it is launched and what is observed.
    """
    fields = {field.name: field.metadata for field in dataclasses.fields(STUDIES.get(study, Run))}
    unsaid = {name for name, about in fields.items() if about.get("cosmetic") and not about.get("names")}
    return [short(line) for line in overrides if section_of(line) not in {*unsaid, *named, *STARTED}]


def shared_changes(jobs: Sequence[Job], named: Collection[str] = ()) -> list[str]:
    """Return the `changes` that all these jobs have, in the order in which they are written."""
    each = [changes(job.overrides, job.config.study, named) for job in jobs]
    shared = set(each[0]).intersection(*each)
    return [line for line in each[0] if line in shared]


def section_of(line: str) -> str:
    """Return the first part of an override's key: optimizer of optimizer.lr=1e-3, hydra of hydra/launcher=local."""
    return re.split(r"[.@=/\[]", line.lstrip("+"))[0]


def short(line: str) -> str:
    """Return an override as a part of a line; a prompt may be long."""
    line = " ".join(line.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys of overrides that not all jobs share, in the order in which they are written."""
    lines = [by_key(job) for job in jobs]
    keys = dict.fromkeys(key for job in lines for key in job)
    return [key for key in keys if len({job.get(key) for job in lines}) > 1]


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides by their keys."""
    return {line.partition("=")[0]: line for line in overrides}
