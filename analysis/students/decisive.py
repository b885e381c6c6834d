"""How often each arm diverged, its differences from two baselines and a reference, and each factor's main effect.

Diverged: the loss stays over 10 times its best for more than 500 steps; of all replicas, by 500 steps before the end.
Left: fractions with Wilson's 95 % intervals. Middle: differences over the same data seeds, whose replicas are averaged
first, with 95 % intervals; filled if the interval excludes 0, otherwise hollow. The reference is MXFP8 with LayerNorm,
gain in bf16, ties to even and scales by floor; every control differs from it in one thing. Bottom: main effects,
averaged over all combinations of the other factors; their intervals, too, are over data seeds.

python -m analysis.students.decisive --runs runs/decisive
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.command import command
from analysis.students.arms import FractionDifference, column_of, difference, ended_replicas, of_arms, table
from analysis.style import TWO_COLUMNS, figure_parser, load_chosen, plt, save
from mxstudy import results

PRECISION, NORM = "mxfp8", "layernorm_bias"  # those of the factorial arms
FACTORS = {  # {name: field, reference level, other levels}
    "gain": ("student.gain", "bf16", ("mx", "fp32")),
    "rounding": ("precision.rounding", "even", ("away",)),
    "scale rule": ("precision.scale_rule", "floor", ("rceil",)),
    "teacher": ("teacher.kind", "code", ("paper",)),
}
SHOWN = {
    "mxfp8_forward_only": "mxfp8, forward only",
    "mxfp8_backward_only": "mxfp8, backward only",
    "mxfp8_bf16_act": "mxfp8, weights only",
    "mxfp8_act_only": "mxfp8, activations only",
}
REFERENCE = "gain bf16, even, floor"
BASELINES = {"minus fp32": "fp32", "minus bf16": "bf16", "minus the reference": REFERENCE}
ALL = "all"
COLORS = {"code": "#0072B2", "paper": "#D55E00", "scaled": "#009E73", ALL: "#000000"}

Interval = Any  # has value, low and high: a Fraction or a FractionDifference


def with_factors(runs: pd.DataFrame) -> pd.DataFrame:
    """Return `ended_replicas` with one column per factor, and `arm`, which names everything except the teacher."""
    done = ended_replicas(runs)
    done = done.assign(**{name: column_of(done, key) for name, (key, _, _) in FACTORS.items()})
    precision, norm = column_of(done, "precision"), column_of(done, "norm")
    factorial = done["gain"].map("gain {}".format) + ", " + done["rounding"] + ", " + done["scale rule"]
    quantised = precision.replace(SHOWN)
    arm = factorial.mask(norm != NORM, norm).mask(precision != PRECISION, quantised)
    arm = arm.mask((norm != NORM) & (precision != PRECISION), quantised + ", " + norm)
    named = done.assign(arm=arm, factorial=(precision == PRECISION) & (norm == NORM))
    return named.sort_values(["factorial", "gain"], ascending=[False, True], kind="stable")


def fractions(runs: pd.DataFrame) -> Interval:
    return results.fraction(int(runs["diverged"].sum()), len(runs))


def less(runs: pd.DataFrame, baseline: str) -> Callable[[pd.DataFrame], Interval | None]:
    """Return a function of an arm's replicas with one teacher: their difference from the baseline with that teacher.

    The function returns None for the baseline itself, and if the baseline has no such replicas.
    """

    theirs = dict(list(runs[runs["arm"] == baseline].groupby("teacher")))

    def of(own: pd.DataFrame) -> Interval | None:
        arm, teacher = own[["arm", "teacher"]].iloc[0]
        return difference(own, theirs[teacher]) if arm != baseline and teacher in theirs else None

    return of


def effects(runs: pd.DataFrame) -> dict[str, dict[str, FractionDifference | None]]:
    """Return main effects by 'FACTOR: LEVEL minus REFERENCE', then by teacher; ALL stands for all teachers."""
    own = runs[runs["factorial"]]
    found: dict[str, dict[str, FractionDifference | None]] = {}
    for factor, (_, reference, levels) in FACTORS.items():
        others = [name for name in FACTORS if name != factor]
        for level in levels:
            parts = {ALL: own}
            if factor != "teacher":
                parts |= {str(teacher): part for teacher, part in own.groupby("teacher")}
            row = {
                name: difference(part[part[factor] == level], part[part[factor] == reference], others)
                for name, part in parts.items()
            }
            found[f"{factor}: {level} minus {reference}"] = row
    return found


def draw(runs: pd.DataFrame) -> Figure:
    """Draw the figure. `runs` are from `with_factors`. Raises ValueError if two replicas of an arm have equal seeds."""
    arms, main = list(dict.fromkeys(runs["arm"])), effects(runs)
    above, below = 0.6 + 0.19 * len(arms), 0.7 + 0.28 * len(main)
    figure = plt.figure(figsize=(TWO_COLUMNS, above + below))
    (top,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(above, below))
    by_arm = [(str(arm), list(own.groupby("teacher"))) for arm, own in runs.groupby("arm", sort=False)]
    titles = {"fraction that diverged": fractions} | {name: less(runs, arm) for name, arm in BASELINES.items()}
    for axes, (title, interval_of) in zip(top.subplots(1, len(titles), sharey=True), titles.items(), strict=True):
        rows = {arm: {str(teacher): interval_of(own) for teacher, own in parts} for arm, parts in by_arm}
        is_difference = interval_of is not fractions
        forest(axes, rows, zero=is_difference)
        axes.set_title(title, fontsize=8)
        axes.set(xlim=(-1.05, 1.05) if is_difference else (-0.03, 1.03))
    axes = bottom.subplots()
    forest(axes, main, zero=True)
    axes.set_title("main effects on the fraction that diverged", fontsize=8)
    axes.set(xlim=(-1.05, 1.05), xlabel="difference of fractions")
    teachers = [name for name in COLORS if name in {*runs["teacher"], ALL}]
    entries = [Line2D([], [], color=COLORS[name], marker="o", ms=3.5, label=shown_teacher(name)) for name in teachers]
    hollow = Line2D([], [], color="0.4", marker="o", ms=3.5, mfc="white", label="the interval contains 0")
    results.legend(figure, *entries, hollow)
    return figure


def forest(axes: Axes, rows: Mapping[str, Mapping[str, Interval | None]], zero: bool) -> None:
    """Draw one row per entry from the top, and one mark per interval, hollow with `zero` if the interval contains 0."""
    for place, intervals in enumerate(rows.values()):
        for offset, (name, interval) in zip(np.linspace(-0.22, 0.22, len(intervals)), intervals.items(), strict=True):
            if interval is None:
                continue
            hollow = zero and interval.low <= 0 <= interval.high
            color, at = COLORS[name], place + (offset if len(intervals) > 1 else 0)
            axes.plot([interval.low, interval.high], [at, at], color=color, linewidth=0.9, solid_capstyle="butt")
            axes.plot(interval.value, at, "o", ms=3.2, color=color, mfc="white" if hollow else color, mew=0.8)
    if zero:
        axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=6.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", alpha=0.12)


def differences_table(runs: pd.DataFrame) -> str:
    """Return Markdown with one line per arm and teacher."""
    columns = ("arm", "teacher", *BASELINES)
    differences = [less(runs, baseline) for baseline in BASELINES.values()]
    cells = [
        (arm, teacher, *(of(own) or "-" for of in differences))
        for (arm, teacher), own in runs.groupby(["arm", "teacher"], sort=False)
    ]
    table = results.markdown(columns, cells, left=columns)
    return f"{table}\n\nDifference of the fractions (95 %), data seeds: verdict."


def effects_table(main: Mapping[str, Mapping[str, FractionDifference | None]]) -> str:
    teachers = list(dict.fromkeys(name for row in main.values() for name in row))
    columns = ("main effect", *map(shown_teacher, teachers))
    cells = [(name, *(row.get(teacher) or "-" for teacher in teachers)) for name, row in main.items()]
    table = results.markdown(columns, cells, left=columns)
    return f"{table}\n\nMean difference of the fractions (95 %), data seeds: verdict."


def shown_teacher(name: str) -> str:
    return "all teachers" if name == ALL else f"teacher {name}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("student_decisive", __doc__)
    chosen = options.parse_args(arguments)
    (runs,) = load_chosen(options, chosen, "runs")
    with options.usage_errors():
        runs = with_factors(runs)
        figure, differences = draw(runs), differences_table(runs)
    arms = runs["arm"] + "; teacher " + runs["teacher"]
    tables = [table(runs, arms), differences, effects_table(effects(runs)), of_arms(runs, arms, None)]
    save(figure, chosen, "\n\n".join([of_arms(runs.iloc[:0], arms.iloc[:0], __doc__).strip(), *tables]))


if __name__ == "__main__":
    main()
