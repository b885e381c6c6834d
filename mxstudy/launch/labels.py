"""The label of each job of a launch: the words by which a user tells it from the others."""

from __future__ import annotations

from collections.abc import Sequence

from mxstudy.launch.composed import Composed


def labels(composed: list[Composed]) -> list[str]:
    """Return for each job the overrides that not all jobs share, or its title if it has none."""
    keys = varying([job.overrides for job in composed])
    return [
        " ".join(line for key, line in by_key(job.overrides).items() if key in keys) or title(job) for job in composed
    ]


def title(job: Composed) -> str:
    """Return the user's choices of precision and norm, else the checkpoint (if both are as_trained) or experiment."""
    choices = [f"{group}={job.choices[group]}" for group in ("precision", "norm") if group in job.choices]
    values = [line for line in job.overrides if line.lstrip("+").startswith(("precision.", "norm."))]
    named = " ".join([*(choice for choice in choices if not choice.endswith("=as_trained")), *values])
    return named or by_key(job.overrides).get("checkpoint") or job.choices.get("experiment", "unnamed")


def varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys of overrides that not all jobs share, in the order in which they are written."""
    lines = [by_key(job) for job in jobs]
    keys = dict.fromkeys(key for job in lines for key in job)
    return [key for key in keys if len({job.get(key) for job in lines}) > 1]


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides by their keys."""
    return {line.partition("=")[0]: line for line in overrides}
