"""Make the parts of the page about what makes students diverge, from its sweeps' tables. Fractions are of all runs."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd
from scipy import stats

from analysis.instability.fig06_learning_rate_grid import KEY, rates
from analysis.pages.decisive_again import DECISIVE_AGAIN
from analysis.pages.decisive_arms import DECISIVE_ARMS
from analysis.pages.marks import Parts, rows
from analysis.pages.student_forks import FORKS
from analysis.pages.student_lots import counted_and_open, lot
from analysis.pages.student_measurements import MEASUREMENTS
from analysis.students.arms import alone, by_pair, shown_interval
from analysis.units import DEPTH, WIDTH
from mxstudy.results import markdown

GRID = {"mx_mix": "MX mix (E4M3 forward, E5M2 backward)", "mxfp6_e2m3": "E2M3", "fp32": "FP32"}
GRID_NAMES = {"mxfp6_e2m3": "E2M3", "mx_mix": "MX mix"}
SMALL = ("lr 1e-05", "lr 5e-05", "lr 0.0001")
RATES = {"lr 0.0005": "5e-4", "lr 0.001": "1e-3", "cosine lr 0.001": "1e-3 to 1e-5, cosine"}


@cache
def grid() -> pd.DataFrame:
    runs = lot("learning_rate_grid")
    return runs.assign(rate=rates(runs))


def learning_rates() -> str:
    runs = grid()
    parts = {"1e-5, 5e-5 and 1e-4": runs["rate"].isin(SMALL)} | {
        said: runs["rate"] == key for key, said in RATES.items()
    }
    cells = []
    for name, chosen in parts.items():
        cell = [name]
        for precision in GRID:
            own = runs[chosen & (runs["choice.precision"] == precision)]
            lost = own["diverged"] > 0
            cell.append(counted_and_open(own) + (f" ({shown_interval(lost)})" if lost.any() else ""))
        cells.append(cell)
    columns = ["learning rate", *GRID.values()]
    return markdown(columns, cells, left=columns)


def counted(width: int, rate: str, precision: str | None = None) -> str:
    """Return how many students of a width diverge at a rate, and how many are open: '4 of 30, 5 open'."""
    runs = grid()
    own = runs[(runs[WIDTH] == width) & (runs["rate"] == rate)]
    return counted_and_open(own if precision is None else own[own["choice.precision"] == precision])


@cache
def grid_pairs(one: str, other: str) -> pd.Series:
    """Return the pairs of students of two precisions, by rate, size and seeds."""
    return by_pair(grid(), "choice.precision", one, other, KEY)


def only(precision: str, rate: str) -> str:
    """Return in how many pairs with FP32 only this precision diverges, and in how many only FP32: '6 to 2'."""
    return " to ".join(map(str, alone(grid_pairs(precision, "fp32")[rate])))


def by_size(one: str, other: str = "fp32") -> str:
    """Return in how many sizes the first diverges more often, and in how many less often.

    For example: '6 sizes and less often in 0 (p = 0.03)'.
    """
    more, less = alone(grid_pairs(one, other).groupby(level=[DEPTH, WIDTH]).sum())
    return f"{more} sizes and less often in {less} (p = {stats.binomtest(more, more + less).pvalue:.2g})"


def small_rates() -> str:
    """Return the number of students at the smallest rates, or '?' if one of them diverged."""
    own = grid()[grid()["rate"].isin(SMALL)]
    return "?" if own["diverged"].any() else str(len(own))


def speed() -> str:
    cells = [
        (f"`{one['teacher']}`", one["replicas"], *(f"{one[key]:,.0f}" for key in ("study", "eager", "ceiling")))
        for one in rows("student_teacher_speed")
    ]
    return markdown(["teacher", "replicas", "study", "eager", "ceiling"], cells, left=["teacher"])


def same_losses() -> str:
    """Return for how many steps, at least, the first replica's losses equal those of every other size of stack."""
    return f"{min(one['equal_steps'] for one in rows('student_teacher_speed')):,}"


STUDENT_TEACHER: Parts = {
    **DECISIVE_ARMS,
    **DECISIVE_AGAIN,
    **FORKS,
    **MEASUREMENTS,
    "learning rates": learning_rates,
    "speed": speed,
    "width 256 at 5e-4": partial(counted, 256, "lr 0.0005"),
    "width 256 at 1e-3": partial(counted, 256, "lr 0.001"),
    "FP32 of width 768 at 5e-4": partial(counted, 768, "lr 0.0005", "fp32"),
    **{f"{GRID_NAMES[p]} alone, {rate}": partial(only, p, key) for p in GRID_NAMES for key, rate in RATES.items()},
    **{f"{name} by size": partial(by_size, p) for p, name in GRID_NAMES.items()},
    "E2M3 and MX mix by size": partial(by_size, "mxfp6_e2m3", "mx_mix"),
    "small rates": small_rates,
    "same losses": same_losses,
}
