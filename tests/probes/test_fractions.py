"""Intervals of fractions against the equations that define them, and how often those of differences hold."""

from __future__ import annotations

import numpy as np
import pytest
from each import each, slow_but
from scipy import optimize, stats

from mxstudy.probes.fractions import fraction, mcnemar, newcombe, paired_difference
from mxstudy.reader import ConfigError

Z = stats.norm.ppf(0.975)
GRID = [(data_seed, seed) for data_seed in range(4) for seed in range(8)]


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


def pairs(both: int, first: int, second: int, neither: int) -> list[tuple[bool, bool]]:
    kinds = [(True, True), (True, False), (False, True), (False, False)]
    return [kind for kind, count in zip(kinds, (both, first, second, neither), strict=True) for _ in range(count)]


def test_newcombes_interval_without_correlation_is_that_of_independent_samples() -> None:
    """Equal margins' products: phi is 0, and the limits are those of scipy's, for two samples."""
    low, high = newcombe(pairs(2, 6, 3, 9))
    (p, p_low, p_high), (q, q_low, q_high) = fraction(8, 20), fraction(5, 20)
    assert low == pytest.approx(p - q - np.hypot(p - p_low, q_high - q))
    assert high == pytest.approx(p - q + np.hypot(p_high - p, q - q_low))


def test_newcombes_interval_changes_sign_with_the_arms_and_narrows_with_correlation() -> None:
    low, high = newcombe(pairs(9, 4, 1, 18))
    assert newcombe(pairs(9, 1, 4, 18)) == pytest.approx((-high, -low))
    apart_low, apart_high = newcombe(pairs(4, 9, 6, 13))  # the same margins, hardly related
    assert high - low < apart_high - apart_low
    assert -1 <= low < 3 / 32 < high <= 1


@each(("first", "second"), [(2, 0), (5, 0), (6, 0), (0, 6), (8, 1), (7, 1), (12, 3), (5, 5)])
def test_mcnemars_interval_contains_0_unless_the_test_rejects(first: int, second: int) -> None:
    low, high = mcnemar(pairs(10, first, second, 3))
    tails = min(stats.binom.cdf(min(first, second), first + second, 0.5) * 2, 1)
    assert (low <= 0 <= high) == (tails > 0.05)
    assert low - 1e-12 <= (first - second) / (13 + first + second) <= high + 1e-12


@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (32, 32)])
def test_arms_alike_cannot_be_told_apart_and_have_an_interval(ours: int, theirs: int) -> None:
    found = paired_difference(dict.fromkeys(GRID, ours > 0), dict.fromkeys(GRID, theirs > 0))
    assert found.verdict == "cannot tell"
    assert found.low < 0 == found.value < found.high


def test_a_clear_difference_and_its_reverse() -> None:
    all_of_them, none = dict.fromkeys(GRID, True), dict.fromkeys(GRID, False)
    more, less = paired_difference(all_of_them, none), paired_difference(none, all_of_them)
    assert (more.verdict, less.verdict) == ("more often", "less often")
    assert (more.value, more.pairs, more.data_seeds) == (1, 32, 4)
    assert 0.7 < more.low < 1 == more.high
    assert (less.low, less.high) == (-1, -more.low)


def test_what_one_teacher_does_is_not_what_teachers_do() -> None:
    """8 of 32 pairs differ: spread over all data seeds that is told from chance, all in one of them it is not."""
    never = dict.fromkeys(GRID, False)
    everywhere = {(d, s): s in (d, d + 4) for d, s in GRID}
    in_one = {(d, s): d == 2 for d, s in GRID}
    assert paired_difference(everywhere, never).verdict == "more often"
    found = paired_difference(in_one, never)
    assert (found.value, found.verdict) == (0.25, "cannot tell")
    by_teacher = stats.ttest_1samp([0, 0, 1, 0], 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((by_teacher.low, min(1, by_teacher.high)))


def test_what_some_initial_weights_do_is_not_what_weights_do() -> None:
    in_two = {(d, s): s in (3, 5) for d, s in GRID}
    found = paired_difference(in_two, dict.fromkeys(GRID, False))
    by_weights = stats.ttest_1samp([0, 0, 0, 1, 0, 1, 0, 0], 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((by_weights.low, by_weights.high))
    assert found.verdict == "cannot tell"


def test_only_seeds_that_both_ran_are_compared() -> None:
    ours = {(0, 0): True, (0, 1): True, (9, 9): True}
    found = paired_difference(ours, {(0, 0): False, (0, 1): False, (7, 7): True})
    assert (found.value, found.pairs, found.data_seeds) == (1, 2, 1)
    assert found.verdict == "cannot tell"  # two pairs
    with pytest.raises(ConfigError, match="share no seeds"):
        paired_difference(ours, {(1, 1): True})


@pytest.mark.integration
@pytest.mark.parametrize(
    ("teachers", "weights", "base", "effect"),
    slow_but([(1, 1, -1, 2)], [(0, 0, -1, 0), (2, 0, -2, 3), (0, 2, 0, 0), (1, 1, -1, 2)]),
)
def test_the_interval_holds_what_it_says(teachers: float, weights: float, base: float, effect: float) -> None:
    """Grids of logits with random teachers and initial weights in either arm; 600 of them, the truth from 20,000."""
    draw = np.random.default_rng(1)

    def arm(grids: int, logit: float) -> np.ndarray:
        by_teacher, by_weights = draw.normal(0, teachers, (grids, 4, 1)), draw.normal(0, weights, (grids, 1, 8))
        return draw.random((grids, 4, 8)) < 1 / (1 + np.exp(-logit - by_teacher - by_weights))

    truth = arm(20_000, base + effect).mean() - arm(20_000, base).mean()
    held = []
    for ours, theirs in zip(arm(600, base + effect), arm(600, base), strict=True):
        found = paired_difference({s: ours[s] for s in GRID}, {s: theirs[s] for s in GRID})
        held.append(found.low <= truth <= found.high)
    assert np.mean(held) > 0.92  # 0.95, less three standard deviations
