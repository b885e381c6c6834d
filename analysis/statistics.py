"""Compute statistics over units that count every run: intervals, censored times to divergence.

A unit is what is independent: a data seed of students, whose initial seeds share teacher and batches and are averaged
first, or a pair of language models with equal seeds. Nothing is dropped: a run that is up at its end, or that simply
ended, is censored, and fractions are of all runs at a stated step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special, stats

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
LEAST_UNITS = 4  # the fewest units for a verdict
BOOTSTRAP_UNITS = 8  # from so many units on, the interval is also bootstrapped
RESAMPLES, SEED = 20_000, 0  # with 2,000 the ends move by a tenth of the width from seed to seed
SHOWS_AFTER = 500  # steps for which a loss must stay up to have diverged; later rises are open at the end

Interval = tuple[float, float]
SHARE, DIFFERENCE = (0.0, 1.0), (-1.0, 1.0)  # the values that a share, and a difference of two, can have


@dataclass(frozen=True, eq=False)
class Effect:
    """An effect with its interval. `units` has one number per unit.

    For fractions, `outcomes` has 0 or 1 for every run of the arm, and of the baseline if there is one. `died` is how
    many runs of either arm have no finite loss in the end, and how many there are. `bootstrapped` and `limits` are for
    rules that were stated before the runs: without a bootstrap, and for shares that are no fractions of runs.
    `planned` asks how so many units would show an effect if they had the mean and spread of `units`.
    """

    units: pd.Series
    outcomes: tuple[pd.Series, ...] = ()
    died: tuple[int, int] = (0, 0)
    bootstrapped: bool = True
    limits: Interval = (-np.inf, np.inf)  # the values that it can have
    planned: int = 0

    @property
    def value(self) -> float:
        return float(self.units.mean())

    @property
    def count(self) -> int:
        return self.planned or len(self.units)

    @property
    def is_enough(self) -> bool:
        return self.count >= LEAST_UNITS

    def interval(self, level: float) -> Interval:
        """Return the smallest interval that contains Student's, BCa's from eight units on, and those of fractions.

        Those of fractions, Wilson's or Newcombe's, treat runs as independent, and give a width where all units agree.
        The interval is cut to the values that the effect can have. Planned units have no bootstrap.
        """
        if self.count < 2:
            return np.nan, np.nan
        found = [student(self.units, level, self.count)]
        if self.bootstrapped and not self.planned and self.count >= BOOTSTRAP_UNITS and self.units.nunique() > 1:
            found.append(bootstrap(self.units, level))
        if self.outcomes:
            found.append(of_fractions(*self.outcomes, level=level, times=self.count / len(self.units)))
        lows, highs = zip(*found, strict=True)
        least, most = (SHARE, DIFFERENCE)[len(self.outcomes) - 1] if self.outcomes else self.limits
        return max(float(min(lows)), least), min(float(max(highs)), most)


@dataclass(frozen=True)
class Exact:
    """A number without chance: the result of arithmetic, the worst of `count` cases."""

    value: float
    count: int = 1
    died: tuple[int, int] = (0, 0)
    is_enough: bool = True

    def interval(self, level: float) -> Interval:
        return self.value, self.value


Found = Effect | Exact


# ------------------------------------------------------------------------------------------------------------ intervals


def student(units: pd.Series, level: float, count: int = 0) -> Interval:
    """Return Student's interval of these units, or of `count` units with their mean and spread."""
    count = count or len(units)
    quantile = special.stdtrit(count - 1, (1 + level) / 2)  # the bits of stats.t.ppf, in a hundredth of the time
    middle, half = units.mean(), quantile * units.std(ddof=1) / np.sqrt(count)
    return float(middle - half), float(middle + half)


def bootstrap(units: pd.Series, level: float) -> Interval:
    """Return the bias-corrected and accelerated bootstrap interval of the mean."""
    drawn = np.random.default_rng(SEED)
    values = (units.to_numpy(float),)
    found = stats.bootstrap(values, np.mean, n_resamples=RESAMPLES, confidence_level=level, random_state=drawn)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def of_fractions(ours: pd.Series, theirs: pd.Series | None = None, *, level: float, times: float = 1.0) -> Interval:
    """Return Wilson's interval of a fraction, or Newcombe's of a difference (1998, method 10: independent runs).

    It is that of `times` as many runs with the same fractions.
    """
    one, *other = (wilson(part.mean(), times * len(part), level) for part in (ours, theirs) if part is not None)
    return newcombe(one, *other) if other else one[1:]


def newcombe(ours: tuple[float, float, float], theirs: tuple[float, float, float]) -> Interval:
    """Return the interval of a difference from both fractions with Wilson's intervals."""
    (p, low, high), (q, q_low, q_high) = ours, theirs
    return float(p - q - np.hypot(p - low, q_high - q)), float(p - q + np.hypot(high - p, q - q_low))


def wilson(fraction: float, runs: float, level: float) -> tuple[float, float, float]:
    """Return the fraction and Wilson's interval.

    `runs` need not be whole, so that one can ask what more runs would tell.
    """
    p, z = float(fraction), float(special.ndtri((1 + level) / 2))
    middle, half = p + z**2 / (2 * runs), z * np.sqrt(p * (1 - p) / runs + z**2 / (4 * runs**2))
    return p, float((middle - half) / (1 + z**2 / runs)), float((middle + half) / (1 + z**2 / runs))


def joint_level(intervals: int) -> float:
    """Return the level at which to take each of `intervals` intervals so that all hold together at CONFIDENCE."""
    return 1 - ALPHA / intervals


# ---------------------------------------------------------------------------------------------------- time to an event


def times(happened_at: pd.Series, open_since: pd.Series, ended_at: pd.Series) -> pd.DataFrame:
    """Return columns time and happened.

    A run without the event is censored when its loss goes up and stays up, or else at its end.
    """
    return pd.DataFrame(
        {"time": happened_at.fillna(open_since).fillna(ended_at).astype(float), "happened": happened_at.notna()}
    )


def fraction_by(step: float, runs: pd.DataFrame) -> float:
    """Return the fraction of all runs to which it has happened by `step`, by Kaplan and Meier. `runs` are from `times`.

    It is NaN if the last run that is known to be well was censored before `step`.
    """
    happened = runs["happened"].to_numpy(bool)
    last = runs["time"].max()
    if last < step and not happened[runs["time"].to_numpy() == last].all():
        return np.nan
    known = stats.CensoredData(uncensored=runs.loc[happened, "time"], right=runs.loc[~happened, "time"])
    return float(stats.ecdf(known).cdf.evaluate(step))


def logrank(ours: pd.DataFrame, theirs: pd.DataFrame, strata: tuple[pd.Series, pd.Series]) -> float:
    """Return the two-sided p of the stratified log-rank test of two arms. It describes, and decides nothing.

    The test assumes independent runs. Runs of a stratum that share teacher and batches are not independent.
    """
    runs = pd.concat([ours.assign(ours=True), theirs.assign(ours=False)])
    excess = variance = 0.0
    for _, own in runs.groupby(pd.concat(strata).to_numpy()):
        for step in own.loc[own["happened"], "time"].unique():
            at_risk, events = own[own["time"] >= step], own[(own["time"] == step) & own["happened"]]
            n, share, d = len(at_risk), at_risk["ours"].mean(), len(events)
            excess += events["ours"].sum() - d * share
            variance += d * share * (1 - share) * (n - d) / max(n - 1, 1)
    return float(stats.chi2.sf(excess**2 / variance, 1)) if variance else np.nan
