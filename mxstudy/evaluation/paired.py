"""Compare two checkpoints on the same questions: the difference of their scores, and whether it is significant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mxstudy.reader import require

DRAWS, CONFIDENCE, SEED = 10_000, 0.95, 0  # of the bootstrap
PART = 100_000  # numbers drawn at a time: they fit in the cache of a core

Scores = Sequence[float]


class Difference(NamedTuple):
    """A mean difference. `p`: McNemar's exact test; None if scores are not 0 or 1, or are losses.

    `low`, `high`: its 95 % interval; NaN where a group has a single document, whose spread nobody knows.
    """

    value: float
    low: float
    high: float
    p: float | None
    documents: int

    def shown(self, times: float = 1, digits: int = 4) -> str:
        """Return '+4.0 [+1.2, +6.8]', or '+4.0' if there is no interval."""
        value, low, high = (f"{times * number:+.{digits}f}" for number in (self.value, self.low, self.high))
        return value if np.isnan(self.low) else f"{value} [{low}, {high}]"


def difference(groups: Sequence[tuple[Scores, Scores]]) -> Difference:
    """Return the mean of ours - theirs over documents, with its paired bootstrap interval (percentiles, 10,000 draws).

    `groups`: (ours, theirs) of one task, or of each of its subjects; documents are drawn within each group, and the
    groups' means are averaged. Raises ConfigError if the scores cannot be paired.
    """
    for ours, theirs in groups:
        require(len(ours) == len(theirs) > 0, f"comparison: cannot pair {len(ours)} documents with {len(theirs)}")
    less = [np.subtract(ours, theirs, dtype=np.float64) for ours, theirs in groups]
    draw = np.random.default_rng(SEED)
    means = np.mean([draw_means(draw, one) for one in less], axis=0)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail]) if all(len(one) > 1 for one in less) else (np.nan, np.nan)
    value = float(np.mean([one.mean() for one in less]))
    return Difference(value, float(low), float(high), mcnemar_p(groups), sum(map(len, less)))


def draw_means(draw: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Return the means of DRAWS bootstrap samples of `values`, each as large as `values`: float64 [DRAWS]."""
    parts = np.array_split(np.arange(DRAWS), 1 + DRAWS * len(values) // PART)
    return np.concatenate([values[draw.integers(len(values), size=(len(part), len(values)))].mean(1) for part in parts])


def mcnemar_p(groups: Sequence[tuple[Scores, Scores]]) -> float | None:
    """Return the two-sided p of McNemar's exact test, or None if a score is not 0 or 1.

    It tests whether each checkpoint answers as many of the documents right that the other answers wrong.
    """
    pairs = [pair for ours, theirs in groups for pair in zip(ours, theirs, strict=True)]
    if not {score for pair in pairs for score in pair} <= {0.0, 1.0}:
        return None
    wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    if not wins + losses:
        return 1.0
    from scipy import stats  # takes a second to import

    return float(stats.binomtest(wins, wins + losses).pvalue)
