"""Arms of the student-teacher study, their differences and main effects, from frames made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from scipy import stats
from student_frames import frame, replica

from analysis import style
from analysis.students import arms, decisive, effects

DATA_SEEDS, SEEDS = (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    style.plt.close("all")


def test_a_line_of_the_table_counts_all_replicas_and_says_which_are_open() -> None:
    runs = frame(
        replica("a", 0, lost=100),
        replica("a", 1, lost=300),
        replica("a", 2),
        replica("a", 3, **{"outcome.rising_at": 890, "outcome.spikes": 2, "outcome.censored": 1}),
        replica("b", 0, state="running"),
    )
    assert list(runs["diverged"]) == [1, 1, 0, 0]
    assert list(runs["open"]) == [False, False, False, True]
    line = arms.table(runs, pd.Series("arm", runs.index)).splitlines()[2]
    wilson = stats.binomtest(2, 4).proportion_ci(method="wilson")
    interval = f"{wilson.low:.2f} .. {wilson.high:.2f}"
    assert line == f"| arm | 4 | 4 | 3 | 2 | 1 | 1 | 2 of 4 | {interval} | 200 | 200 | 1 | 0.75 .. inf |"


def test_an_arm_is_named_by_choices_or_fields_and_numbers_are_in_order() -> None:
    depths = (12, 4, 4, 6)
    runs = frame(*(replica("a", i, **{"config.model.num_layers": depth}) for i, depth in enumerate(depths)))
    names = arms.named(runs, ["precision", "model.num_layers"])
    ordered = [f"precision mxfp8, num_layers {depth}" for depth in (4, 6, 12)]
    assert arms.sorted_arms(names) == ordered
    with pytest.raises(ValueError, match=r"model\.depth: is neither a group nor a field of these runs"):
        arms.named(runs, ["model.depth"])


def test_replicas_with_the_same_seeds_are_no_one_arm() -> None:
    with pytest.raises(ValueError, match="share their seeds: a; b"):
        arms.by_seeds(frame(replica("a"), replica("b")))


# ------------------------------------------------------------------------------------------------------- main effects


def by_seeds(values: np.ndarray) -> pd.Series:
    """[data seeds, seeds]."""
    pairs = [(seed, data) for data, seed in product(range(values.shape[0]), range(values.shape[1]))]
    return pd.Series(values.ravel(), index=pd.MultiIndex.from_tuples(pairs, names=effects.SEEDS))


def test_an_effect_of_ones_and_zeros_has_agresti_and_min_s_interval() -> None:
    """Their formula, for 3 pairs where only the first diverged, 1 where only the second did, and 12 alike."""
    values = np.array([[1, 1, 1, -1] + [0] * 12]).T.astype(float)  # 16 data seeds, one initial seed each
    found = effects.effect(by_seeds(values))
    b, c, n = 3.5, 1.5, 18
    half = 1.959964 / n * math.sqrt(b + c - (b - c) ** 2 / n)
    by_teacher = stats.ttest_1samp(values.ravel(), 0).confidence_interval()
    assert found.value == pytest.approx(2 / 16)
    assert found.low == pytest.approx(min((b - c) / n - half, by_teacher.low))
    assert found.high == pytest.approx(max((b - c) / n + half, by_teacher.high))


def test_an_effect_that_is_one_teacher_s_is_told_from_one_that_all_teachers_have() -> None:
    one, all_of_them = np.zeros((4, 8)), np.full((4, 8), 0.25)
    one[2] = 1.0
    only = effects.effect(by_seeds(one))
    half = stats.t.ppf(0.975, 3) * np.std([0, 0, 1, 0], ddof=1) / 2
    assert (only.value, only.low, only.high) == pytest.approx((0.25, 0.25 - half, min(1, 0.25 + half)))
    assert (only.verdict, effects.effect(by_seeds(all_of_them)).verdict) == ("cannot tell", "more often")


def test_nothing_that_ever_happens_has_an_interval_all_the_same() -> None:
    nothing = effects.effect(by_seeds(np.zeros((4, 8))))
    assert (nothing.value, nothing.verdict) == (0, "cannot tell")
    assert -0.07 < nothing.low < -0.05 < 0.05 < nothing.high < 0.07


def factorial(diverges: Callable[..., bool]) -> pd.DataFrame:
    """All of decisive's factorial arms and FP32; `diverges(gain, rounding, rule, teacher, data_seed, seed)`."""
    rows = []
    levels = product(("bf16", "mx", "fp32"), ("even", "away"), ("floor", "rceil"), ("code", "paper"), DATA_SEEDS)
    for gain, rounding, rule, teacher, data_seed in levels:
        arm = dict(zip(("gain", "rounding", "rule", "teacher"), (gain, rounding, rule, teacher), strict=True))
        rows += of_arm(
            "mxfp8", arm, data_seed, lambda seed, arm=arm, data=data_seed: diverges(**arm, data=data, seed=seed)
        )
    for teacher, data_seed in product(("code", "paper"), DATA_SEEDS):
        arm = {"gain": "fp32", "rounding": "even", "rule": "rceil", "teacher": teacher}
        rows += of_arm("fp32", arm, data_seed, lambda seed: False)
    return pd.DataFrame(rows)


def of_arm(
    precision: str, arm: dict[str, str], data_seed: int, diverges: Callable[[int], bool]
) -> list[dict[str, object]]:
    columns = {
        "config.data_seed": data_seed,
        "choice.precision": precision,
        "choice.norm": "layernorm_bias",
        "config.student.gain": arm["gain"],
        "config.precision.rounding": arm["rounding"],
        "config.precision.scale_rule": arm["rule"],
        "config.teacher.kind": arm["teacher"],
    }
    name = "-".join([precision, *arm.values(), str(data_seed)])
    return [replica(name, seed, lost=500 if diverges(seed) else math.nan, **columns) for seed in SEEDS]


def by_gain_and_teacher(gain: str, rounding: str, rule: str, teacher: str, data: int, seed: int) -> bool:
    """With the code's teacher: half of the seeds with the gain in MX, a quarter else; the same for all data."""
    return teacher == "code" and seed < (4 if gain == "mx" else 2)


def test_main_effects_are_the_mean_differences_of_fractions() -> None:
    runs = decisive.with_factors(factorial(by_gain_and_teacher))
    found = decisive.effects(runs)
    mx, fp32 = found["gain: mx less bf16"], found["gain: fp32 less bf16"]
    assert [mx[teacher].value for teacher in ("all", "code", "paper")] == pytest.approx([0.125, 0.25, 0])
    assert (fp32["code"].value, found["rounding: away less even"]["all"].value) == (0, 0)
    assert found["teacher: paper less code"]["all"].value == pytest.approx(-(0.5 + 0.25 + 0.25) / 3)
    assert {len(row) for name, row in found.items() if "teacher" not in name} == {3}
    assert mx["code"].pairs == 32  # of seeds, however many arms these ran in


@pytest.mark.integration
def test_the_decisive_figure_has_a_mark_for_each_arm_and_teacher() -> None:
    runs = decisive.with_factors(factorial(by_gain_and_teacher))
    figure = decisive.draw(runs)
    fractions, to_fp32, to_bf16, to_reference, effects = figure.axes
    names = [label.get_text() for label in fractions.get_yticklabels()]
    assert (names[0], names[-1], len(names)) == ("gain bf16, even, floor", "fp32", 13)
    marks = [line for line in fractions.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in marks][:2] == [0.25, 0.0]
    assert len(marks) == 26
    filled = {to_hex(line.get_markerfacecolor()) != "#ffffff" for line in to_fp32.lines if line.get_marker() == "o"}
    assert filled == {True, False}
    assert not [line for line in to_bf16.lines if line.get_marker() == "o"]  # which was not run
    assert sum(line.get_marker() == "o" for line in to_reference.lines) == 24  # not of the reference itself
    assert len(effects.get_yticklabels()) == 5


def test_the_decisive_tables_say_what_they_cannot_tell() -> None:
    runs = decisive.with_factors(factorial(by_gain_and_teacher))
    lines = decisive.differences_table(runs).splitlines()
    by_name = {tuple(line.split(" | ")[:2]): line for line in lines}
    assert "+0.50 (" in by_name["| gain mx, even, floor", "code"]
    assert by_name["| gain mx, even, floor", "code"].count("more often") >= 1
    assert by_name["| gain mx, even, floor", "paper"].count("cannot tell") == 2
    assert by_name["| fp32", "code"].split(" | ")[2] == "-"
    table = decisive.effects_table(decisive.effects(runs)).splitlines()
    assert table[0] == "| main effect | all teachers | teacher code | teacher paper |"
    assert table[-3].endswith("| - | - |")  # the teacher's own
