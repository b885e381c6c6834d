"""Intervals of fractions satisfy the equations that define them."""

from __future__ import annotations

import pytest
from each import each
from scipy import optimize, stats

from mxstudy.probes.fractions import fraction
from mxstudy.reader import ConfigError

Z = stats.norm.ppf(0.975)


@each(("count", "runs"), [(0, 8), (1, 4), (3, 32), (16, 32), (31, 32), (32, 32)])
def test_wilsons_limits_are_where_the_score_test_rejects(count: int, runs: int) -> None:
    value, low, high = fraction(count, runs)
    assert value == count / runs

    def score(p: float) -> float:
        return (value - p) / (p * (1 - p) / runs) ** 0.5

    if count:
        assert low == pytest.approx(optimize.brentq(lambda p: score(p) - Z, 1e-12, value - 1e-9), abs=1e-6)
    if count < runs:
        assert high == pytest.approx(optimize.brentq(lambda p: score(p) + Z, value + 1e-9, 1 - 1e-12), abs=1e-6)
    assert (low == 0, high == 1) == (count == 0, count == runs)


@each(("count", "runs"), [(1, 0), (5, 4), (-1, 4)])
def test_fractions_of_nothing_are_refused(count: int, runs: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} of {runs} runs"):
        fraction(count, runs)
