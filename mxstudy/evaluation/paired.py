"""Two checkpoints on the same questions: the difference of their scores, and whether it can be told from chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from mxstudy.reader import require

DRAWS, CONFIDENCE, SEED = 10_000, 0.95, 0


class Difference(NamedTuple):
    """`low`, `high`: 95 % interval of the mean; `p`: McNemar's exact test, None where the numbers are no 0 and 1."""

    value: float
    low: float
    high: float
    p: float | None
    documents: int


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Mean of ours less theirs, document by document, with its paired bootstrap interval (percentiles, 10,000 draws).

    Raises ConfigError for scores that cannot be paired.
    """
    require(len(ours) == len(theirs) > 0, f"comparison: {len(ours)} documents here, {len(theirs)} there")
    less = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    draw = np.random.default_rng(SEED)
    means = np.array([less[draw.integers(len(less), size=len(less))].mean() for _ in range(DRAWS)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(float(less.mean()), float(low), float(high), mcnemar_p(ours, theirs), len(less))


def mcnemar_p(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Two-sided: of the documents that only one of the two answers right, are as many ours as theirs?"""
    if not {*ours, *theirs} <= {0.0, 1.0}:
        return None
    wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
    losses = sum(a < b for a, b in zip(ours, theirs, strict=True))
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
