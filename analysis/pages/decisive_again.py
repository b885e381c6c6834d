"""Make the parts of the students' page about the lot `decisive_again`: eight data seeds of one code, stated before."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd

from analysis.pages.decisive_arms import title
from analysis.pages.marks import Parts, rows_of
from analysis.pages.stated_lots import judged, verdict_table
from analysis.pages.student_lots import counted, counted_and_open, shown
from analysis.students.arms import difference, middle_step
from analysis.students.decisive import REFERENCE, with_factors
from analysis.units import DATA_SEED
from mxstudy.results import markdown

ARMS = {  # an arm's name here, and in the table
    "bf16": "bf16",
    "MXFP8": REFERENCE,
    "gains in MX": "gain mx, even, floor",
    "rceil": "gain bf16, even, rceil",
    "weights only": "mxfp8, weights only",
    "forward only": "mxfp8, forward only",
    "E5M2": "mxfp8_e5m2",
}
CLAIMS = ("mxfp8-less-bf16", "weights-only", "forward-only", "gains-in-mx", "scale-rule", "e5m2")


@cache
def runs() -> pd.DataFrame:
    return with_factors(rows_of("runs", "decisive_4"))


def of_arm(name: str) -> pd.DataFrame:
    return runs()[runs()["arm"] == ARMS[name]]


def arms() -> str:
    """Return a table of the arms: runs that diverged, and differences by data seed."""
    cells = []
    for name, arm in ARMS.items():
        own = of_arm(name)
        by_seed = (own["diverged"] > 0).groupby(own[DATA_SEED]).sum()
        less = ["-" if name == other else less_than(name, other) for other in ("bf16", "MXFP8")]
        steps = middle_step(own["outcome.diverged_at"])
        cells.append((title(arm), counted(own), own["open"].sum(), ", ".join(map(str, by_seed)), steps, *less))
    columns = [
        *("arm", "diverged by step 8,500", "up at the end", "diverged of 8, by data seed", "median step"),
        *("minus bf16", "minus the reference"),
    ]
    return markdown(columns, cells, left=[columns[0], columns[3], *columns[5:]])


def less_than(name: str, other: str) -> str:
    """Return the difference of the fractions that diverged, of all runs."""
    return shown(difference(of_arm(name), of_arm(other)))


def without_open() -> str:
    """Return gains in MX minus gains in bf16 if open runs are in no fraction, which decides nothing."""
    ours, theirs = (own[~own["open"]] for own in (of_arm("gains in MX"), of_arm("MXFP8")))
    return shown(difference(ours, theirs))


def verdicts() -> str:
    """Return a table of the claims that this lot judges, with their verdicts."""
    claims = {one.claim.id: one for one in judged("student_teacher")}
    return verdict_table(claims[f"instability-{name}"] for name in CLAIMS)


def count(name: str) -> str:
    return counted_and_open(of_arm(name))


COMPARED = {
    "MXFP8": "bf16",
    "weights only": "MXFP8",
    "forward only": "bf16",
    "E5M2": "MXFP8",
    "gains in MX": "MXFP8",
}

DECISIVE_AGAIN: Parts = {
    "arms again": arms,
    "verdicts again": verdicts,
    "gains in MX minus MXFP8, without open runs": without_open,
    **{f"{name} again": partial(count, name) for name in ARMS},
    **{f"{name} minus {other} again": partial(less_than, name, other) for name, other in COMPARED.items()},
}
