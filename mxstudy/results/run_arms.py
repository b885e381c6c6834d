"""Sort the runs of a frame into arms, and summarise each over its seeds: mean, interval, difference, divergences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from mxstudy.results.estimates import Estimate, estimate
from mxstudy.tracking.arms import Described, arms_of, run_names

CONFIG, CHOICE, BASELINE, REPLICATES = "config.", "choice.", "config.baseline.", "config.replicates."
LOST = "diverged"


def with_arms(runs: pd.DataFrame, baseline: Mapping[str, str] | None = None, but: Sequence[str] = ()) -> pd.DataFrame:
    """Return the runs with the columns arm, color, name, unit and partner, named among these runs.

    name: that of the arm and the seeds. unit: the seeds, by which runs are paired. partner: the arm that this one is
    compared with, its own name if it is a baseline, None if there is none. `baseline`: group choices in place of those
    that the configs name. `but`: more keys, or beginnings of keys, in which runs of one arm may differ.
    """
    if baseline is not None:
        others = [column for column in runs if not column.startswith(BASELINE)]
        runs = runs[others].copy()  # pandas warns about every column that is added to views of many
        runs = runs.assign(**{f"{BASELINE}{group}": choice for group, choice in baseline.items()})
    ignored = [column for column in runs if column.startswith(tuple(f"{CONFIG}{key}" for key in but))] if but else []
    described = descriptions(runs.drop(columns=ignored))
    arms = arms_of(described)
    return runs.assign(
        arm=[arm.name for arm in arms],
        color=[arm.color for arm in arms],
        name=run_names(described, arms),
        unit=[" ".join(f"{key}={value}" for key, value in run.unit) for run in described],
        partner=[arm.partner for arm in arms],
    )


def descriptions(runs: pd.DataFrame) -> list[Described]:
    """Return the description of each run in a frame with columns `config.*` and `choice.*`."""
    configs = {column: column.removeprefix(CONFIG) for column in runs if column.startswith(CONFIG)}
    choices = {column: column.removeprefix(CHOICE) for column in runs if column.startswith(CHOICE)}
    rows = runs[[*configs, *choices]].to_dict("records")
    return [
        Described(
            {key: row[column] for column, key in configs.items()},
            {key: row[column] for column, key in choices.items() if isinstance(row[column], str)},
        )
        for row in rows
    ]


def partner_of(runs: pd.DataFrame) -> str | None:
    """Return the name of the arm's partner; a frame has NaN for none."""
    partner = runs["partner"].iloc[0]
    return partner if isinstance(partner, str) else None


@dataclass(frozen=True)
class ArmRow:
    """The summary of an arm's runs: their number, the number that diverged, and the mean of the others.

    `difference`: from the partner's, over the pairs of equal seeds in which both runs finished; None for a baseline and
    for an arm without a partner.
    """

    arm: str
    color: str
    runs: pd.DataFrame
    lost: int
    mean: Estimate
    partner: str | None
    difference: Estimate | None


def arm_rows(runs: pd.DataFrame, column: str) -> list[ArmRow]:
    """Return a row for each arm, in the order of their first runs. `runs`: from `with_arms`."""
    alive = runs[runs["state"] != LOST].groupby(["arm", "unit"])[column].mean()
    values = {arm: own.droplevel("arm") for arm, own in alive.groupby(level="arm")}
    nothing = pd.Series(dtype=float)
    rows = []
    for arm, own in runs.groupby("arm", sort=False):
        partner = partner_of(own)
        ours, theirs = (values.get(name, nothing) for name in (arm, partner))
        apart = None if partner in (arm, None) else estimate((ours - theirs).dropna())
        lost = int((own["state"] == LOST).sum())
        rows.append(ArmRow(str(arm), own["color"].iloc[0], own, lost, estimate(ours), partner, apart))
    return rows
