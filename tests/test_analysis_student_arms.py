"""Arms of the student-teacher study, their differences and main effects are right for frames made by hand."""

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

from analysis.students import arms, decisive

DATA_SEEDS, SEEDS = (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7)


pytestmark = pytest.mark.usefixtures("figure_rules")


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
        arms.difference(frame(replica("a"), replica("b")), frame(replica("c")))


# ------------------------------------------------------------------------------------------------------- main effects


def arm(diverged: np.ndarray) -> pd.DataFrame:
    """Return an arm. `diverged` is [data seeds, seeds] of 0 and 1, or NaN if open."""
    rows = [
        replica("a", seed, **{"config.data_seed": data, "outcome.diverged_at": 9 if lost == 1 else math.nan})
        | {"outcome.rising_at": math.nan if lost == lost else 99}
        for (data, seed), lost in np.ndenumerate(diverged)
    ]
    return frame(*rows)


def test_a_difference_is_over_data_seeds_and_no_run_is_left_out() -> None:
    nothing, half = np.zeros((4, 8)), np.zeros((4, 8))
    half[:, :4] = 1
    half[3, :2] = math.nan  # open: not diverged, but counted among the runs
    found = arms.difference(arm(half), arm(nothing))
    units = [0.5, 0.5, 0.5, 0.25]
    t = stats.ttest_1samp(units, 0).confidence_interval()
    assert (found.value, found.low, found.high, found.units) == pytest.approx((0.4375, t.low, t.high, 4))
    assert found.verdict == "more often"
    assert arms.difference(arm(nothing), arm(half)).verdict == "less often"


def test_what_one_data_seed_does_is_not_what_data_seeds_do() -> None:
    one = np.zeros((4, 8))
    one[2] = 1
    assert arms.difference(arm(one), arm(np.zeros((4, 8)))).verdict == "cannot tell"


def test_data_seeds_that_agree_have_an_interval_all_the_same() -> None:
    nothing = arms.difference(arm(np.zeros((4, 8))), arm(np.zeros((4, 8))))
    assert (nothing.value, nothing.verdict) == (0, "cannot tell")
    assert nothing.low < -0.05 < 0.05 < nothing.high


def test_fewer_than_four_data_seeds_cannot_tell() -> None:
    three = arms.difference(arm(np.ones((3, 8))), arm(np.zeros((3, 8))))
    assert three.low > 0
    assert three.verdict == "cannot tell"
    assert str(arms.difference(arm(np.ones((1, 8))), arm(np.zeros((1, 8))))) == "+1.00, 1: cannot tell"
    assert arms.difference(arm(np.ones((1, 8))), arm(np.ones((1, 8))).assign(**{"config.data_seed": 7})) is None


def test_no_verdict_is_made_from_mixed_code() -> None:
    """All runs of one arm diverge, and none of the other.

    They are of four data seeds and two codes, and each code has both arms.
    """
    parts = [
        part.assign(code=seeds.map(lambda seed: "ab"[seed % 2]), fingerprint=seeds.map(f"{name} {{}}".format))
        for name, part in (("ours", arm(np.ones((4, 8)))), ("theirs", arm(np.zeros((4, 8)))))
        for seeds in [part["config.data_seed"]]
    ]
    mixed = arms.difference(*parts)
    assert mixed.low > 0
    assert mixed.verdict == "cannot tell (mixed code)"
    one = arms.difference(*(part.assign(code="a") for part in parts))
    assert one.verdict == "more often"


def factorial(diverges: Callable[..., bool]) -> pd.DataFrame:
    """Return decisive's factorial arms and FP32, by `diverges(gain, rounding, rule, teacher, data_seed, seed)`."""
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
    """With the code's teacher, half of the seeds diverge with the gain in MX, else a quarter, the same for all data."""
    return teacher == "code" and seed < (4 if gain == "mx" else 2)


def test_main_effects_are_the_mean_differences_of_fractions() -> None:
    runs = decisive.with_factors(factorial(by_gain_and_teacher))
    found = decisive.effects(runs)
    mx, fp32 = found["gain: mx minus bf16"], found["gain: fp32 minus bf16"]
    assert [mx[teacher].value for teacher in ("all", "code", "paper")] == pytest.approx([0.125, 0.25, 0])
    assert (fp32["code"].value, found["rounding: away minus even"]["all"].value) == (0, 0)
    assert found["teacher: paper minus code"]["all"].value == pytest.approx(-(0.5 + 0.25 + 0.25) / 3)
    assert {len(row) for name, row in found.items() if "teacher" not in name} == {3}
    assert mx["code"].units == 4  # data seeds, however many arms ran in these


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
    assert not [line for line in to_bf16.lines if line.get_marker() == "o"]  # an arm that was not run
    assert sum(line.get_marker() == "o" for line in to_reference.lines) == 24  # the reference itself has none
    assert len(effects.get_yticklabels()) == 5


@pytest.mark.integration
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
