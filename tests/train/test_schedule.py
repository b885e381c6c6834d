import math
from itertools import pairwise

import pytest
from each import each

from mxstudy.config import Schedule
from mxstudy.train.schedule import lr_ratio


def ratios(steps: int = 100, **settings) -> list[float]:
    return [lr_ratio(Schedule(**settings), step, steps) for step in range(steps)]


@each("kind", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(kind):
    curve = ratios(kind=kind)
    assert curve[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert curve[10] == 1.0


@each("kind", ["cosine", "linear", "wsd", "constant"])
def test_a_warm_up_in_steps_is_as_long_in_any_run(kind):
    for steps in (40, 100, 3000):
        curve = ratios(steps, kind=kind, warmup_steps=7)
        assert curve[:7] == pytest.approx([(step + 1) / 8 for step in range(7)])
        assert curve[7] == 1.0
    assert ratios(kind=kind, warmup_steps=10) == ratios(kind=kind, warmup_fraction=0.1)


@each("kind", ["cosine", "linear", "wsd"])
def test_the_last_step_is_at_the_final_ratio(kind):
    assert ratios(kind=kind, final_ratio=0.05)[-1] == pytest.approx(0.05)


def test_cosine_is_half_way_down_in_the_middle_of_the_decay():
    assert lr_ratio(Schedule(kind="cosine", warmup_fraction=0.0, final_ratio=0.0), 50, 101) == pytest.approx(0.5)
    assert lr_ratio(Schedule(kind="cosine", warmup_fraction=0.0, final_ratio=0.0), 25, 101) == pytest.approx(
        (1 + math.cos(math.pi / 4)) / 2
    )


def test_linear_falls_in_equal_steps():
    curve = ratios(kind="linear")
    differences = {round(a - b, 12) for a, b in pairwise(curve[10:])}
    assert len(differences) == 1


def test_wsd_is_flat_until_its_decay():
    curve = ratios(kind="wsd", decay_fraction=0.3)
    assert set(curve[10:71]) == {1.0}
    assert curve[71] < 1.0


@each(("steps", "fraction"), [(5, 0.2), (7, 0.1), (100, 0.01)])
def test_a_decay_in_one_step_ends_at_the_final_ratio_too(steps, fraction):
    wsd = Schedule(kind="wsd", warmup_fraction=0.0, decay_fraction=fraction, final_ratio=0.25)
    assert [lr_ratio(wsd, step, steps) for step in range(steps)] == [1.0] * (steps - 1) + [0.25]


def test_constant_stays():
    assert set(ratios(kind="constant")[10:]) == {1.0}


def test_a_warm_up_may_begin_above_zero():
    curve = ratios(kind="cosine", initial_ratio=0.1)
    assert curve[:10] == pytest.approx([0.1 + 0.9 * (step + 1) / 11 for step in range(10)])
    assert curve[10] == 1.0
