"""Judge claims about students: how often arms diverged, what forks did, and what was measured in training.

The unit is the data seed. A divergence shows when the loss has stayed up for 500 steps, so the stated step is the end
minus 500: by then it is known of every run whether it has diverged, and none is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analysis.instability import claims as prestated
from analysis.ledger.claim import NOT_RUN, Evidence, in_one_code, others
from analysis.ledger.tables import Missing, Tables
from analysis.statistics import SHOWS_AFTER, Effect, fraction_by, logrank, times
from analysis.students import arms as replicas
from analysis.students.arms import REPLICA, before_divergence, ended_replicas
from analysis.units import DATA_SEED, STEPS, Arm, chosen, compared, ended, less, of_one_code, scale

UNITS = "data seeds"


@dataclass(frozen=True)
class Diverges:
    """A judge of the fraction that diverged by the stated step: the arm's, or the arm's minus the baseline's.

    `over` are columns with the settings of an arm, such as learning rates. The settings of a data seed are averaged.
    `unstable` counts the runs that are up at the end, diverged or open, in place of those that diverged by then.
    `without_open` leaves open runs out of fractions, as results/prestated.md has it for lots of students.
    """

    tables: Sequence[str]
    arm: Arm
    baseline: Arm = field(default_factory=dict)
    over: Sequence[str] = ()
    unstable: bool = False
    without_open: bool = False

    def __call__(self, tables: Tables) -> Evidence:
        arms = compared(self.arm, self.baseline)
        runs, left = in_one_code(ended_replicas(tables.load("runs", *self.tables)), arms, [DATA_SEED], self.over)
        parts = [runs[chosen(runs, arm)] for arm in arms]
        step = float(runs[STEPS].min()) - SHOWS_AFTER
        counted = [part[~part["open"]] for part in parts] if self.without_open else parts
        units = [of_units(part, step, self.over, self.unstable) for part in counted]
        fractions = less(units).groupby(level=0).mean()
        happened = [by_now(part, step, self.unstable) for part in counted]
        said = [self.counts(part, one, step) for part, one in zip(parts, happened, strict=True)]
        note = "; baseline: ".join(said)
        if self.baseline and not self.unstable:
            note += described(*parts)
        found = Effect(fractions, outcomes=tuple(happened))
        return Evidence(found, UNITS, note, here=scale(pd.concat(parts)), **left)

    def counts(self, runs: pd.DataFrame, happened: pd.Series, step: float) -> str:
        if self.unstable:
            return f"{happened.sum():.0f} of {len(runs)} are over 10 times their best at the end"
        said = up_at_the_end(runs["open"].sum(), " and in no fraction" if self.without_open else "")
        return f"{happened.sum():.0f} of {len(happened)} diverged by step {step:,.0f}{said}"


def up_at_the_end(count: int, how: str) -> str:
    """Return what is said of runs that are up at their end: ', 2 more are up at the end', or '' if there are none."""
    return f", {count} more are up at the end{how}" if count else ""


def outcome_times(runs: pd.DataFrame) -> pd.DataFrame:
    return times(runs["outcome.diverged_at"], runs["outcome.rising_at"], runs[STEPS])


def of_units(runs: pd.DataFrame, step: float, over: Sequence[str], unstable: bool) -> pd.Series:
    """Return the fraction of each data seed and setting. Initial seeds are averaged first."""
    if unstable:
        return replicas.unstable(runs).astype(float).groupby([runs[key] for key in (DATA_SEED, *over)]).mean()
    return runs.groupby([DATA_SEED, *over]).apply(lambda own: fraction_by(step, outcome_times(own)))


def by_now(runs: pd.DataFrame, step: float, unstable: bool) -> pd.Series:
    return (replicas.unstable(runs) if unstable else runs["outcome.diverged_at"] <= step).astype(float)


def described(ours: pd.DataFrame, theirs: pd.DataFrame) -> str:
    """Return the log-rank test of both arms, stratified by data seed, which decides nothing."""
    p = logrank(outcome_times(ours), outcome_times(theirs), (ours[DATA_SEED], theirs[DATA_SEED]))
    return "" if np.isnan(p) else f"; log-rank by data seed p = {p:.2g}"


# ----------------------------------------------------------------------------------------------- what was stated before


@dataclass(frozen=True)
class Prestated:
    """A judge by the rule that results/prestated.md fixed before the runs.

    `table` is the lot's. `general` says what the general rules say, which is shown where it differs.
    """

    claim: prestated.PrestatedClaim
    table: str
    general: Callable[[Tables], str] | None = None

    def __call__(self, tables: Tables) -> Evidence:
        together = prestated.of_figure(self.claim.figure)
        runs = ended_replicas(tables.load("runs", self.table))
        measured = tables.one(self.table, prestated.LAST_BIN)
        found = prestated.judged(self.claim, runs, pd.DataFrame() if measured is None else measured, len(together))
        if found.verdict == NOT_RUN:
            raise Missing("no runs of an arm in these tables")
        note, general = "by the rule stated before", self.general(tables) if self.general else found.verdict
        if general != found.verdict:
            note += f"; by the general rules (all runs counted, 95 % for the claim alone): {general}"
        here = scale(runs[chosen(runs, self.claim.arm)])
        return Evidence(found.effect, UNITS, note, found.verdict, found.price, here)


# ---------------------------------------------------------------------------------------------------------------- forks


@dataclass(frozen=True)
class Intervention:
    """A judge of the fraction of forks that diverge with an intervention, minus that of the control or of another.

    `change` and `against` are columns config.intervention.* that are set, while all others are not. `point` is where
    the forks begin. Open forks are in no fraction, as results/prestated.md has it for lots of students.
    """

    point: str
    change: Arm
    against: Arm
    tables: tuple[str, ...] = ("interventions", "interventions_2")

    def __call__(self, tables: Tables) -> Evidence:
        runs = ended(tables.load("runs", *self.tables))
        fields = [name for name in runs if name.startswith("config.intervention.")]
        columns = [name for name in fields if runs[name].nunique(dropna=False) > 1]  # the others are set in all of them
        changes = [dict.fromkeys(columns) | dict(one) for one in (self.change, self.against)]
        forks = tables.load("forks", *self.tables).query("point == @self.point")
        forks = forks.merge(runs[["fingerprint", "commit", *columns]])
        own = of_one_code(forks, changes, ["data_seed"])
        parts = [own[chosen(own, change)] for change in changes]
        if not all(len(part) for part in parts):
            raise Missing(f"no forks at {self.point} with this intervention")
        still = [part["diverged_at"].isna() & part["rising_at"].notna() for part in parts]
        counted = [part[~is_open] for part, is_open in zip(parts, still, strict=True)]
        units = [part.groupby("data_seed")["diverged_at"].agg(lambda at: at.notna().mean()) for part in counted]
        outcomes = tuple(part["diverged_at"].notna().astype(float) for part in counted)
        note = "; ".join(
            f"{one.sum():.0f} of {len(one)} diverged{up_at_the_end(is_open.sum(), ' and in no fraction')}"
            for one, is_open in zip(outcomes, still, strict=True)
        )
        left = others(forks, own, changes, ["data_seed"])
        return Evidence(Effect(less(units), outcomes=outcomes), UNITS, note, others=left)


# --------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True)
class Measured:
    """A judge of a number that a probe measured: each replica's, averaged by data seed, minus a baseline's if given.

    `of` makes one number from a replica's rows. The steps before its divergence come first.
    """

    table: str
    probe: str
    of: Callable[[pd.DataFrame], float]
    arm: Arm
    baseline: Arm = field(default_factory=dict)
    before: bool = True

    def __call__(self, tables: Tables) -> Evidence:
        arms = compared(self.arm, self.baseline)
        runs, left = in_one_code(ended(tables.load("runs", self.table)), arms, [DATA_SEED])
        rows = tables.load(self.probe, self.table)
        units = []
        for arm in arms:
            own = runs.loc[chosen(runs, arm), [*REPLICA, DATA_SEED, "outcome.diverged_at"]]
            measured = rows.merge(own)
            measured = before_divergence(measured) if self.before else measured
            by_replica = measured.sort_values("step").groupby([DATA_SEED, *REPLICA]).apply(self.of)
            units.append(by_replica.groupby(level=0).mean())
        return Evidence(Effect(less(units)), UNITS, here=scale(runs), **left)


def last(column: str) -> Callable[[pd.DataFrame], float]:
    return lambda rows: float(rows[column].iloc[-1])


def middle(column: str) -> Callable[[pd.DataFrame], float]:
    return lambda rows: float(rows[column].median())


def running_mean(numbers: pd.Series) -> pd.Series:
    return numbers.rolling(20).mean().dropna()


def place_of_least(column: str) -> Callable[[pd.DataFrame], float]:
    """Return where in a replica's measurements the running mean of 20 is lowest, from 0 (first) to 1 (last)."""

    def of(rows: pd.DataFrame) -> float:
        smooth = running_mean(rows[column]).to_numpy()
        return float(smooth.argmin() / max(len(smooth) - 1, 1)) if len(smooth) else np.nan

    return of


def product_of(*columns: str) -> Callable[[pd.DataFrame], float]:
    return lambda rows: float(rows[list(columns)].prod(axis=1).median())


@dataclass(frozen=True)
class Ends:
    """A judge of the logarithm of the final loss, the arm's minus the baseline's, with what died counted."""

    tables: Sequence[str]
    arm: Arm
    baseline: Arm
    over: Sequence[str] = ()

    def __call__(self, tables: Tables) -> Evidence:
        arms = [self.arm, self.baseline]
        runs, left = in_one_code(ended_replicas(tables.load("runs", *self.tables)), arms, [DATA_SEED], self.over)
        parts = [runs[chosen(runs, arm)] for arm in arms]
        lost = [replicas.unstable(part) for part in parts]
        logs = [
            np.log(part["loss"].astype(float)).mask(gone).groupby([part[key] for key in (DATA_SEED, *self.over)]).mean()
            for part, gone in zip(parts, lost, strict=True)
        ]
        dead, of = int(sum(gone.sum() for gone in lost)), int(sum(map(len, lost)))
        note = f"{dead} of {of} are up at the end and in no mean"
        return Evidence(
            Effect(less(logs).groupby(level=0).mean(), died=(dead, of)), UNITS, note, here=scale(runs), **left
        )
