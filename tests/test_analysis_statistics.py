"""Intervals, Holm's correction, and times to divergence are right, and drop nobody."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import statistics
from analysis.statistics import Effect, bootstrap, fraction_by, logrank, of_fractions, student, times, wilson

NAN = math.nan


def units(*values: float) -> pd.Series:
    return pd.Series(values, dtype=float)


def test_the_interval_is_students_and_from_eight_units_on_the_bootstraps_too() -> None:
    few, many = units(1, 2, 3, 10, 2, 1, 1), units(1, 2, 3, 10, 2, 1, 1, 30)
    assert Effect(few).interval(0.95) == student(few, 0.95)
    low, high = student(few, 0.95)
    assert (low, high) == pytest.approx(stats.ttest_1samp(few, 0).confidence_interval())
    assert bootstrap(many, 0.95)[1] > student(many, 0.95)[1]  # the outlier skews the mean
    assert Effect(many).interval(0.95) == (student(many, 0.95)[0], bootstrap(many, 0.95)[1])


def test_the_bootstraps_ends_hardly_depend_on_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve pairs with an outlier, at the 98.75 % of a figure with four claims."""
    many = pd.Series([36, 38, 42, 46, 49, 53, 57, 60, 63, 66, 74, 98], dtype=float)
    ends = []
    for seed in range(6):
        monkeypatch.setattr(statistics, "SEED", seed)
        ends.append(bootstrap(many, 0.9875))
    spread, width = np.ptp(ends, axis=0), np.ptp(ends[0])
    assert (spread < 0.05 * width).all()


def test_planned_units_and_stated_rules_have_no_bootstrap() -> None:
    many = units(1, 2, 3, 10, 2, 1, 1, 30)
    assert Effect(many, bootstrapped=False).interval(0.95) == student(many, 0.95)
    assert Effect(many, planned=20).interval(0.95) == student(many, 0.95, 20)
    assert Effect(many, bootstrapped=False, limits=(0, 10)).interval(0.95) == (0, 10)


def test_units_that_agree_have_an_interval_all_the_same() -> None:
    """Student's interval has no width there, but eight runs of eight that diverge are still only eight runs."""
    all_of_them = units(*[1.0] * 8)
    found = Effect(all_of_them, outcomes=(all_of_them,))
    assert found.interval(0.95) == pytest.approx((stats.binomtest(8, 8).proportion_ci(method="wilson").low, 1))
    low, high = of_fractions(all_of_them, all_of_them, level=0.95)
    assert low < 0 < high
    assert wilson(0.25, 8, 0.95)[1:] == pytest.approx(stats.binomtest(2, 8).proportion_ci(method="wilson"))


def test_an_interval_of_fractions_stays_where_fractions_can_be() -> None:
    """Student's interval over two units, 12.7 standard errors wide, leaves that range."""
    apart, some = units(0.25, 0.75), units(0, 1, 1, 1)
    low, high = Effect(apart).interval(0.95)
    assert low < -1 < 1 < high
    assert Effect(apart, outcomes=(some,)).interval(0.95) == (0, 1)
    assert Effect(apart, outcomes=(some, some)).interval(0.95) == (-1, 1)


def test_one_unit_has_no_interval() -> None:
    assert all(math.isnan(limit) for limit in Effect(units(1.0)).interval(0.95))


def test_open_runs_are_censored_and_not_dropped() -> None:
    """Of 32 runs 9 diverge and 6 are up at the end. The fraction is 9 of 32, and not of 26."""
    happened = pd.Series([100.0 * i for i in range(1, 10)] + [NAN] * 23)
    open_since = pd.Series([NAN] * 9 + [8700.0] * 6 + [NAN] * 17)
    runs = times(happened, open_since, pd.Series([9000.0] * 32))
    assert list(runs["time"].iloc[[8, 9, -1]]) == [900, 8700, 9000]
    assert runs["happened"].sum() == 9
    assert fraction_by(8500, runs) == pytest.approx(9 / 32)
    assert fraction_by(450, runs) == pytest.approx(4 / 32)


def test_runs_that_were_cut_off_leave_the_risk() -> None:
    """One of four diverges, one is cut off, then one of the remaining two diverges: 1 - 3/4 * 1/2."""
    runs = times(pd.Series([10.0, NAN, 30.0, NAN]), pd.Series([NAN] * 4), pd.Series([50.0, 20.0, 50.0, 50.0]))
    assert fraction_by(40, runs) == pytest.approx(1 - 3 / 4 / 2)
    assert math.isnan(fraction_by(60, runs))  # no run was seen for so long
    assert fraction_by(60, runs[runs["happened"]]) == 1


def test_the_log_rank_test_is_scipys_within_one_stratum_and_adds_over_strata() -> None:
    draw = np.random.default_rng(0)
    ours, theirs = (
        pd.DataFrame({"time": draw.exponential(scale, 30), "happened": draw.random(30) < 0.8}) for scale in (1.0, 3.0)
    )
    one = pd.Series(0, ours.index)
    known = [
        stats.CensoredData(uncensored=own.loc[own["happened"], "time"], right=own.loc[~own["happened"], "time"])
        for own in (ours, theirs)
    ]
    assert logrank(ours, theirs, (one, one)) == pytest.approx(stats.logrank(*known).pvalue, rel=1e-6)
    two = [pd.concat([own, own], ignore_index=True) for own in (ours, theirs)]
    strata = pd.Series([0] * 30 + [1] * 30)
    chi2 = stats.chi2.isf(logrank(ours, theirs, (one, one)), 1)
    assert logrank(*two, (strata, strata)) == pytest.approx(stats.chi2.sf(2 * chi2, 1))
