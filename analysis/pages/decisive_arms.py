"""Make the parts of the students' page about the arms of `decisive`: four data seeds, of two codes.

A run has diverged if its loss stays over 10 times its best for more than 500 steps. So 500 steps before its end it is
known of every run whether it has diverged by then, and fractions are of all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import pandas as pd

from analysis.pages.marks import Parts, least_and_most, one_or_range, rows_of, share_of
from analysis.pages.student_lots import counted, shown
from analysis.students.arms import (
    FractionDifference,
    difference,
    middle_step,
    quartiles,
    shown_interval,
)
from analysis.students.decisive import ALL, REFERENCE, effects, with_factors
from analysis.units import DATA_SEED
from mxstudy.results import markdown

DECISIVE = ("decisive", "decisive_2", "decisive_3")
CODE, TEXT = "code", "paper"  # teachers
RULES = ("floor", "rceil")


@cache
def decisive() -> pd.DataFrame:
    return with_factors(rows_of("runs", *DECISIVE))


def of_arm(arm: str, teacher: str = CODE) -> pd.DataFrame:
    runs = decisive()
    return runs[(runs["arm"] == arm) & (runs["teacher"] == teacher)]


def title(name: str) -> str:
    """Return an arm's name for a table. The factorial's arms and the norms are in MXFP8."""
    if name.startswith("gain ") or name in ("rmsnorm", "mxnorm_p1", "mxnorm_p2"):
        return f"MXFP8, {name}"
    return {"fp32": "FP32", "bf16_act": "bf16 activations"}.get(name, name)


def order() -> list[str]:
    """Return the names of the arms: baselines, controls, the factorial, other formats, norms."""
    first = ["fp32", "bf16", *(f"mxfp8, {which}" for which in ("backward only", "weights only", "forward only"))]
    first += ["mxfp8, activations only"]
    found = list(dict.fromkeys(decisive()["arm"]))
    gains = [name for name in found if name.startswith("gain ")]
    formats = [name for name in found if name.startswith("mxfp") and name not in first]
    return [*first, *gains, *formats, *(n for n in found if n not in {*first, *gains, *formats})]


def arms() -> str:
    cells = []
    for name in order():
        own, text = of_arm(name), of_arm(name, TEXT)
        by_seed = (own["diverged"] > 0).groupby(own[DATA_SEED]).mean()
        cells.append(
            (
                title(name),
                counted(own),
                shown_interval(own["diverged"] > 0),
                own["open"].sum() or "-",
                ", ".join(f"{value:.2g}" for value in by_seed),
                middle_step(own["outcome.diverged_at"]),
                f"{middle_loss(text):.3g}",
            )
        )
    columns = [
        *("arm", "diverged by step 8,500", "95 %, runs", "up at the end", "by data seed", "median step"),
        "final loss, teacher `paper`",
    ]
    return markdown(columns, cells, left=["arm", "by data seed", "95 %, runs"])


def middle_loss(runs: pd.DataFrame) -> float:
    """Return the median final loss, which is that of a run."""
    return float(quartiles(runs["loss"])[1])


def of_differences() -> str:
    cells = []
    for name in order():
        less = [
            difference(of_arm(name), of_arm(other)) if name != other else None for other in ("fp32", "bf16", REFERENCE)
        ]
        cells.append((title(name), *("-" if one is None else shown(one) for one in less)))
    columns = ["arm", "minus FP32", "minus bf16", "minus the reference"]
    return markdown(columns, cells, left=columns)


@cache
def main_effects() -> dict[str, dict[str, FractionDifference | None]]:
    return effects(decisive())


def of_effects() -> str:
    cells = [
        (name, *(words(by_teacher.get(teacher)) for teacher in (ALL, CODE)))
        for name, by_teacher in main_effects().items()
    ]
    columns = ["", "all", "teacher `code`"]
    return markdown(columns, cells, left=columns)


def words(found: FractionDifference | None) -> str:
    return "" if found is None else f"{shown(found)}: {found.verdict}"


def effect(name: str) -> str:
    """Return a factor's main effect with the code's teacher."""
    return shown(main_effects()[name][CODE])


def of_text() -> pd.DataFrame:
    runs = decisive()
    return runs[runs["teacher"] == TEXT]


def count_of(arm: str) -> str:
    return counted(of_arm(arm))


@cache
def less(arm: str, other: str) -> str:
    return shown(difference(of_arm(arm), of_arm(other)))


def quantised_forward() -> list[str]:
    """Return the arms with LayerNorm whose activations are quantised in the forward pass."""
    others = ("fp32", "bf16", "mxfp8, backward only", "mxfp8, weights only")
    return [name for name in order() if name not in others and "norm" not in name]


def lost_in(names: Sequence[str]) -> str:
    """Return the fewest and the most diverged runs of these arms with the code's teacher: '9 to 26 of 32'."""
    counts = pd.Series([(of_arm(name)["diverged"] > 0).sum() for name in names])
    (size,) = {len(of_arm(name)) for name in names}
    return f"{least_and_most(counts, 'd')} of {size}"


def final(*names: str) -> str:
    """Return the median final loss of an arm with the text's teacher.

    For several arms, return the lowest and the highest median.
    """
    return one_or_range(pd.Series([middle_loss(of_arm(name, TEXT)) for name in names]), ".4f")


def over_rmsnorm() -> str:
    """Return by how much MXNorm's final losses are above RMSNorm's, with the text's teacher."""
    losses = of_text().groupby("arm").apply(middle_loss)
    return least_and_most(100 * (losses[["mxnorm_p1", "mxnorm_p2"]] / losses["rmsnorm"] - 1), ".0f") + " %"


def factorial(gains: Sequence[str], rules: Sequence[str] = RULES) -> list[str]:
    """Return the arms of the factorial with these gains and scale rules, in both roundings."""
    return [f"gain {gain}, {rounding}, {rule}" for gain in gains for rounding in ("even", "away") for rule in rules]


FINAL = {
    "FP32": "fp32",
    "bf16": "bf16",
    "MXFP8": REFERENCE,
    "weights": "mxfp8, weights only",
    "activations": "mxfp8, activations only",
    "the backward": "mxfp8, backward only",
    "E5M2": "mxfp8_e5m2",
}

DECISIVE_ARMS: Parts = {
    "quantised forward": lambda: lost_in(quantised_forward()),
    **{f"final loss of {name}": partial(final, arm) for name, arm in FINAL.items()},
    **{f"final loss of gains in MX, {rule}": partial(final, *factorial(["mx"], [rule])) for rule in RULES},
    "MXNorm over RMSNorm": over_rmsnorm,
    "spikes": lambda: f"{decisive()['outcome.spikes'].sum():.0f}",
    "arms": arms,
    "differences": of_differences,
    "effects": of_effects,
    "MXFP8": partial(count_of, REFERENCE),
    "FP32": partial(count_of, "fp32"),
    "rmsnorm": partial(count_of, "rmsnorm"),
    "rmsnorm in bf16": partial(count_of, "bf16, rmsnorm"),
    "MXFP8 minus FP32": partial(less, REFERENCE, "fp32"),
    "teacher of the text": lambda: share_of(of_text()["diverged"] != 0),
    "gains out of MX": lambda: counted(pd.concat(map(of_arm, factorial(["bf16", "fp32"])))),
    "gains in MX": lambda: counted(pd.concat(map(of_arm, factorial(["mx"])))),
    "rceil": partial(effect, "scale rule: rceil minus floor"),
    "up at the end": lambda: str(int(decisive()["open"].sum())),
    "runs": lambda: f"{len(decisive()):,}",
    "diverged": lambda: str(int((decisive()["diverged"] > 0).sum())),
}
