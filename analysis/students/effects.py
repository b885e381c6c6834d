"""Main effects of a factorial comparison: the effect of a factor's level, averaged over the levels of the others.

All arms share their seeds, so an effect is one number per pair of seeds (data seed, initial seed), and the interval is
taken over these pairs: replicas of other arms with the same seeds reduce the noise but are not additional runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from analysis.statistics import CONFIDENCE
from analysis.units import SEEDS


class Effect(NamedTuple):
    """Mean difference of the fraction that diverged, with its 95 % interval and the number of pairs of seeds."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "more often"
        return "less often" if self.high < 0 else "cannot tell"

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} .. {self.high:+.2f}), {self.pairs}: {self.verdict}"


def main_effect(runs: pd.DataFrame, factor: str, level: str, reference: str, others: Sequence[str]) -> Effect | None:
    """Return how much more often runs of `level` diverged than runs of `reference` with equal `others` and seeds.

    `runs`: from `students.arms.ended`, with a column per factor. Returns None if no seeds
    have both.
    """
    keys = [*SEEDS, *others]
    ours, theirs = (runs[runs[factor] == one].set_index(keys)["diverged"] for one in (level, reference))
    if ours.index.has_duplicates or theirs.index.has_duplicates:
        raise ValueError(f"two replicas have the same seeds and the same {', '.join([factor, *others])}")
    differences = (ours - theirs).dropna()
    return effect(differences.groupby(level=list(SEEDS)).mean()) if len(differences) else None


def effect(by_seeds: pd.Series) -> Effect:
    """Return the mean effect, from differences in -1 .. 1, one per pair of seeds; index: (initial seed, data seed).

    The interval is the widest of three. Agresti and Min's treats pairs as independent; it adds two pseudo-pairs, which
    are 1, 0 and -1 with weights 1/2, 1 and 1/2 (2005, Statistics in Medicine 24, 729), so its width is positive even if
    all differences are 0. Student's t over the means of the data seeds takes into account that runs share a teacher,
    and over the means of the initial seeds that they share initial weights; each needs at least two means.
    """
    values, n = by_seeds.to_numpy(dtype=float), len(by_seeds)
    center = values.sum() / (n + 2)
    variance = ((values**2).sum() + 1) / (n + 2) - center**2
    half = stats.norm.ppf((1 + CONFIDENCE) / 2) * np.sqrt(variance / (n + 2))
    intervals = [(center - half, center + half)]
    for shared in SEEDS:
        means = by_seeds.groupby(level=shared).mean()
        if len(means) > 1:
            half = stats.t.ppf((1 + CONFIDENCE) / 2, len(means) - 1) * stats.sem(means)
            intervals.append((values.mean() - half, values.mean() + half))
    lows, highs = zip(*intervals, strict=True)
    return Effect(float(values.mean()), max(-1.0, float(min(lows))), min(1.0, float(max(highs))), n)
