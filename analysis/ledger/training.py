"""Judge claims about language models: losses paired by seed, divergences, spikes, norms' outputs and scores.

The unit is a pair of runs with equal seeds. For a number of one arm it is the arm's runs with one pair of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from analysis.ledger.claim import Evidence, Judge, Left, NotPossible, in_one_code
from analysis.ledger.costs import gpu_hours
from analysis.ledger.rules import UNCLEAR
from analysis.ledger.tables import Missing, Tables
from analysis.statistics import Effect
from analysis.units import RATE, SEEDS, Arm, chosen, compared, died, differing, ended, less, paired, scale
from mxstudy.results import bin_edges

PAIRS, RUNS = "pairs of seeds", "seeds"
LONGEST_RUN_H = 25 / 60  # on one GPU; a claim with longer runs is not possible here


def arms_of(
    tables: Tables, names: Sequence[str], arms: Sequence[Arm], over: Sequence[str]
) -> tuple[pd.DataFrame, Left]:
    """Return the runs of these tables that ended, of one code and of seeds that have all of them."""
    return in_one_code(ended(tables.load("runs", *names)), arms, SEEDS, over)


@dataclass(frozen=True)
class Difference:
    """A judge of `column` of the arm minus the baseline's, paired by seeds. `over`: columns with an arm's settings.

    `beside`: two arms, whose difference is taken off.
    `is_relative` takes the difference of logarithms, which is the difference as a share of the baseline's value.
    `bootstrapped`: false for a rule that was stated before the runs with Student's interval alone.
    """

    tables: Sequence[str]
    arm: Arm
    baseline: Arm
    column: str = "validation_loss"
    over: Sequence[str] = ()
    is_relative: bool = False
    beside: Sequence[Arm] = ()
    bootstrapped: bool = True

    def __call__(self, tables: Tables) -> Evidence:
        arms = [self.arm, self.baseline, *self.beside]
        runs, left = arms_of(tables, self.tables, arms, self.over)
        runs = runs.assign(**{self.column: np.log(runs[self.column])}) if self.is_relative else runs
        found = self.between(runs, self.arm, self.baseline)
        if self.beside:
            taken = self.between(runs, *self.beside)
            dead, count = (sum(both) for both in zip(found.died, taken.died, strict=True))
            found = Effect(less((found.units, taken.units)), died=(dead, count))
        found = replace(found, bootstrapped=self.bootstrapped)
        parts = [runs[chosen(runs, arm)] for arm in arms]
        lost = [died(part, self.column) for part in parts]
        note = "; ".join(f"{part.sum()} of {len(part)} died" for part in lost) if found.died[0] else ""
        if self.column == "spike_score" and not any(part["spikes"].any() for part in parts):
            return Evidence(
                found, PAIRS, "no run spikes, so that scores measure noise", UNCLEAR, here=scale(runs), **left
            )
        return Evidence(found, PAIRS, note, here=scale(runs), **left)

    def between(self, runs: pd.DataFrame, arm: Arm, baseline: Arm) -> Effect:
        ours, theirs = chosen(runs, arm), chosen(runs, baseline)
        varied = set(differing(runs[ours | theirs])) - set(self.over)
        return paired(runs, self.column, ours, theirs, varied)


@dataclass(frozen=True)
class Dies:
    """A judge of the fraction of an arm's runs that diverged, minus the baseline's if there is one."""

    tables: Sequence[str]
    arm: Arm
    baseline: Arm = field(default_factory=dict)
    over: Sequence[str] = ()

    def __call__(self, tables: Tables) -> Evidence:
        arms = compared(self.arm, self.baseline)
        runs, left = arms_of(tables, self.tables, arms, self.over)
        lost = [died(own := runs[chosen(runs, arm)], "loss").astype(float).set_axis(own.index) for arm in arms]
        units = [part.groupby([runs.loc[part.index, key] for key in SEEDS]).mean() for part in lost]
        note = "; ".join(f"{part.sum():.0f} of {len(part)} diverged" for part in lost)
        effect, unit = Effect(less(units), outcomes=tuple(lost)), PAIRS if self.baseline else RUNS
        return Evidence(effect, unit, note, here=scale(runs), **left)


@dataclass(frozen=True)
class BestRate:
    """A judge of the distance in powers of 2 from the baseline's best learning rate to the arm's, by seed."""

    tables: Sequence[str]
    arm: Arm
    baseline: Arm

    def __call__(self, tables: Tables) -> Evidence:
        runs, left = arms_of(tables, self.tables, [self.arm, self.baseline], [RATE])
        best = []
        for arm in (self.arm, self.baseline):
            own = runs[chosen(runs, arm)]
            losses = own["validation_loss"].astype(float).fillna(np.inf)
            lowest = own.loc[losses.groupby([own[key] for key in SEEDS]).idxmin()].set_index([*SEEDS])
            best.append(np.log2(lowest[RATE].astype(float)))
        return Evidence(Effect(less(best)), PAIRS, here=scale(runs), **left)


@dataclass(frozen=True)
class Probed:
    """A judge of a number that a probe measured in each run: the arm's, minus the baseline's if there is one."""

    tables: Sequence[str]
    probe: str
    of: Callable[[pd.DataFrame], float]
    arm: Arm
    baseline: Arm = field(default_factory=dict)

    def __call__(self, tables: Tables) -> Evidence:
        arms = compared(self.arm, self.baseline)
        runs, left = arms_of(tables, self.tables, arms, ())
        rows = tables.load(self.probe, *self.tables)
        units = []
        for arm in arms:
            measured = rows.merge(runs.loc[chosen(runs, arm), ["fingerprint", *SEEDS]])
            units.append(pd.Series({seeds: self.of(own) for seeds, own in measured.groupby([*SEEDS])}))
        return Evidence(Effect(less(units)), PAIRS if self.baseline else RUNS, here=scale(runs), **left)


def farthest_from_one(rows: pd.DataFrame) -> float:
    """Return the largest distance from 1, after the first tenth of the steps, of the median norm's output RMS."""
    norms = rows.filter(regex=r"^layers\..*/rms$")[rows["step"] > 0.1 * rows["step"].max()]
    return float((norms - 1).abs().median(axis=1).max())


def largest_input(rows: pd.DataFrame) -> float:
    """Return log2 of the largest |input| of any norm at the last step."""
    return float(np.log2(rows.sort_values("step").filter(regex=r"/absmax$").iloc[-1].max()))


def fullest_last_bin(rows: pd.DataFrame) -> float:
    """Return the largest share, over steps, of a gain in the last bin by floor.

    The gains are those of norms before MLPs and of q and k.
    """
    gains = rows.filter(regex=r"^layers\..*(feed_forward\..*norm|[qk]_norm)\.weight/floor/overflow_fraction$")
    return float(gains.max().max())


def reach(rows: pd.DataFrame) -> float:
    """Return the largest |output| divided by its bound at the last step, of the norm that comes nearest to its bound.

    Outputs are counted in bins of a quarter octave. The lower edge of the outermost filled bin counts as reached.
    """
    final, edges, shares = rows.sort_values("step").iloc[-1], bin_edges(), []
    for name in rows.filter(regex=r"^layers\..*/output$"):
        filled = np.flatnonzero(np.asarray(final[name]))
        inner = max(-edges[filled[0] + 1], edges[filled[-1]])
        shares.append(inner / final[name.replace("/output", "/bound")])
    return float(max(shares))


@dataclass(frozen=True)
class Scores:
    """A judge of a score that models got, the arm's minus the baseline's in percentage points, paired by their seeds.

    `scores` are tables of evaluations, `training` tables of the runs that trained the models. `task` is a name in the
    tables.
    """

    scores: Sequence[str]
    training: Sequence[str]
    arm: Arm
    baseline: Arm
    task: str = "average of 9"
    form: str = "best"

    def __call__(self, tables: Tables) -> Evidence:
        runs, left = arms_of(tables, self.training, [self.arm, self.baseline], ())
        rows = tables.load("scores", *self.scores)
        rows = rows[
            (rows["task"] == self.task) & ((rows["form"] == self.form) | (rows["best"] & (self.form == "best")))
        ]
        rows = rows.drop_duplicates("fingerprint", keep="last").assign(trained=rows["checkpoint"].str.split("/").str[0])
        runs = runs.assign(trained=runs["fingerprint"].str[:12])
        units = []
        for arm in (self.arm, self.baseline):
            own = rows.merge(runs.loc[chosen(runs, arm), ["trained", *SEEDS]], on="trained")
            units.append(own.set_index([*SEEDS])["score"].groupby(level=[0, 1]).mean())
        points = 100 * less(units)
        if not len(points):
            raise Missing("no scores of an arm in these tables")
        return Evidence(Effect(points), PAIRS, here=scale(runs), **left)


# --------------------------------------------------------------------------------------------- what cannot be done here


def at_scale(parameters: float, tokens: float, runs: int, judge: Judge | None = None) -> Judge:
    """Return the judge of a claim whose own scale is not possible here: it says what `runs` of that scale would take.

    If there are tables of it all the same, `judge` decides.
    """

    def at(tables: Tables) -> Evidence:
        if judge is not None:
            with suppress(Missing):
                return judge(tables)
        hours = gpu_hours(tables, parameters, tokens, runs)
        assert hours > runs * LONGEST_RUN_H
        raise NotPossible(f"{hours:,.0f} H200 hours for {runs} runs, at llama_1b's measured MFU")

    return at


def without_blackwell(tables: Tables) -> Evidence:
    """Judge a claim for which the hardware is missing."""
    raise NotPossible("MX matrix units: a Blackwell GPU")
