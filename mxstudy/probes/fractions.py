"""Fractions of runs in which something happened, with 95 % intervals."""

from __future__ import annotations

from typing import NamedTuple

from mxstudy.reader import require

CONFIDENCE = 0.95


class Fraction(NamedTuple):
    """A fraction of runs. `low`, `high`: Wilson's 95 % interval, for independent runs."""

    value: float
    low: float
    high: float


def fraction(count: int, runs: int) -> Fraction:
    """Return count / runs with its interval. Raises ConfigError if there are no runs, or fewer than `count`."""
    require(0 <= count <= runs and runs > 0, f"fraction: {count} of {runs} runs is not between 0 and 1")
    from scipy import stats  # takes a second to import

    low, high = stats.binomtest(count, runs).proportion_ci(CONFIDENCE, method="wilson")
    return Fraction(count / runs, float(low), float(high))
