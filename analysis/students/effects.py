"""Main effects of a factorial comparison: what a factor's level changes, averaged over the levels of the others.

All arms share their seeds, so an effect is a number a pair of seeds (data seed, initial seed), and the interval is one
over these: replicas of other arms with the same seeds are no more runs, only less noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from analysis.compare import CONFIDENCE, SEEDS


class Effect(NamedTuple):
    """Mean difference of the fraction that diverged; 95 % interval; over so many pairs of seeds."""

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
    """How much more often runs of `level` diverged than those of `reference`, with the same `others` and seeds.

    `runs` of `students.arms.ended`, columns by name; what is open is left out. None where no seeds have both.
    """
    keys = [*SEEDS, *others]
    ours, theirs = (
        runs[runs[factor] == one].dropna(subset="diverged").set_index(keys)["diverged"] for one in (level, reference)
    )
    if ours.index.has_duplicates or theirs.index.has_duplicates:
        raise ValueError(f"two replicas have the same seeds and the same {', '.join([factor, *others])}")
    differences = (ours - theirs).dropna()
    return effect(differences.groupby(level=list(SEEDS)).mean()) if len(differences) else None


def effect(by_seeds: pd.Series) -> Effect:
    """Of differences in -1 .. 1, one a pair of seeds: `by_seeds` has (initial seed, data seed) as its index.

    The interval is the widest of three. Agresti and Min's takes pairs as independent; it adds to the n pairs two that
    are 1, 0 and -1 with weights of 1/2, 1 and 1/2 (2005, Statistics in Medicine 24, 729), and so has a width where all
    differences are 0. Student's over the means of the data seeds knows that runs share a teacher, and over those of the
    initial seeds that they share initial weights; each where there are at least two.
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
