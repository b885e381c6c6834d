"""Curves of arms over training: a mean and a band over the runs that did not diverge, a thin line for each that did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from mxstudy.results.run_arms import LOST, partner_of

HALF_LIFE = 0.01  # half-life of the exponential mean, as a share of a run's steps
THIN: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.6}


def smoothed(losses: pd.Series) -> pd.Series:
    return losses.ewm(halflife=max(1.0, HALF_LIFE * len(losses))).mean()


@dataclass(frozen=True)
class Curves:
    """The curves of an arm, one column per run, named by its seeds. `lost` are the diverged, `alive` the others."""

    arm: str
    color: str
    partner: str | None
    alive: pd.DataFrame
    lost: pd.DataFrame

    def less(self, other: Curves) -> pd.DataFrame:
        """Return the differences between living runs of equal seeds."""
        shared = self.alive.columns.intersection(other.alive.columns)
        return self.alive[shared].sub(other.alive[shared]).dropna(how="all")

    def shown(self, convert: Callable[[pd.DataFrame], pd.DataFrame]) -> Curves:
        """Return the curves after `convert` has changed their values."""
        return replace(self, alive=convert(self.alive), lost=convert(self.lost))


def curves_of(rows: pd.DataFrame, runs: pd.DataFrame, column: str, x: str, smooth: bool = False) -> Iterator[Curves]:
    """Yield the curves of each arm: `column` of `rows` by `x`. `runs`: from `with_arms`.

    Raises ValueError for two runs of an arm with the same seeds.
    """
    by_run = dict(list(rows.groupby("fingerprint")))
    for arm, own in runs[runs["fingerprint"].isin(by_run)].groupby("arm", sort=False):
        if own["unit"].duplicated().any():
            raise ValueError(
                f"--runs: two runs of the arm {str(arm)!r} have the same seeds; exclude one with --without"
            )
        drawn: dict[bool, dict[str, pd.Series]] = {True: {}, False: {}}
        for run in own.to_dict("records"):
            values = by_run[run["fingerprint"]].drop_duplicates(x, keep="last").set_index(x)[column]
            values = values.where(np.isfinite(values))
            drawn[run["state"] == LOST][run["unit"]] = smoothed(values).where(values.notna()) if smooth else values
        frames = (pd.DataFrame(drawn[lost]) for lost in (False, True))
        yield Curves(str(arm), own["color"].iloc[0], partner_of(own), *frames)


def band(axes: Any, values: pd.DataFrame, color: str, **style: Any) -> None:
    """Draw the mean of the columns where all have values, and a band from the lowest to the highest."""
    whole = values.dropna()
    if whole.shape[1] > 1:
        low, high = whole.min(axis=1), whole.max(axis=1)
        axes.fill_between(whole.index, low, high, color=color, alpha=0.2, linewidth=0, label="range of seeds")
    axes.plot(whole.index, whole.mean(axis=1), color=color, **style)


def draw_arm(axes: Any, curves: Curves, **style: Any) -> None:
    """Draw an arm: its living runs as mean and band, each that diverged as a thin line with a cross at its end."""
    named = {"label": curves.arm}
    if curves.alive.shape[1]:
        band(axes, curves.alive, curves.color, **named, **style)
        named = {}
    for unit in curves.lost:
        line = curves.lost[unit].dropna()
        axes.plot(line.index, line, color=curves.color, **named, **THIN)
        axes.plot(line.index[-1:], line.iloc[-1:], "x", color=curves.color, markersize=5, label="diverged")
        named = {}
