"""Make the parts of the page about figure 6 of the instability paper: learning rates of 2e-4 to 6e-4."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from analysis.instability.claims import LR
from analysis.pages import students
from analysis.pages.marks import Parts, least_and_most, share_of
from analysis.pages.student_lots import back, counted, difference, findings, lot, shown, verdicts
from analysis.students import arms as replicas
from analysis.students.arms import alone, by_pair, middle_step, shown_interval, unstable
from analysis.units import DATA_SEED, SEEDS, WIDTH
from mxstudy.results import markdown

RATES = {"2e-4": 2e-4, "4e-4": 4e-4, "6e-4": 6e-4}
PRECISIONS = {"fp32": "FP32", "mx_mix": "MX mix"}


def window(precision: str | None = None, width: int | None = None, rate: float | None = None) -> pd.DataFrame:
    runs = lot("learning_rate_window")
    for column, value in {"choice.precision": precision, WIDTH: width, LR: rate}.items():
        runs = runs if value is None else runs[runs[column] == value]
    return runs


def pairs(rate: float, width: int | None = None) -> pd.Series:
    """Return the pairs of runs of one width and seeds in both precisions."""
    return by_pair(window(width=width, rate=rate), "choice.precision", "fp32", "mx_mix", [WIDTH, *SEEDS])


def by_rate() -> str:
    cells = []
    for width, rate in sorted({*window()[[WIDTH, LR]].itertuples(index=False, name=None)}):
        own = [window(precision, width, rate) for precision in PRECISIONS]
        lost = [part["diverged"] > 0 for part in own]
        both = pairs(rate, width)
        medians = [middle_step(part["outcome.diverged_at"]) for part in own]
        cells.append(
            (
                int(width),
                f"{rate:.0e}".replace("e-0", "e-"),
                *(f"{share_of(one)} ({shown_interval(one)})" for one in lost),
                ", ".join(str(part["open"].sum()) for part in own),
                len(both),
                *alone(both),
                "-" if medians == ["-", "-"] else " and ".join(medians),
            )
        )
    columns = [
        *("width", "learning rate", *PRECISIONS.values(), "up at the end, FP32 and MX mix", "pairs"),
        *("FP32 alone", "MX mix alone", "median step, FP32 and MX mix"),
    ]
    return markdown(columns, cells, left=["learning rate", *PRECISIONS.values(), columns[4], columns[-1]])


def by_data_seed() -> str:
    seeds, cells = sorted(window()[DATA_SEED].unique()), []
    for precision, name in PRECISIONS.items():
        for width in sorted(window()[WIDTH].unique()):
            own = window(precision, width)
            up = unstable(own)
            cells.append((f"{name}, width {width:.0f}", *(up[own[DATA_SEED] == seed].sum() for seed in seeds)))
    return markdown(["", *map(str, seeds)], cells, left=[""])


def diverged(*of: Any, **also: Any) -> str:
    """Return how many of the runs that `window` chooses diverged."""
    return counted(window(*of, **also))


def not_stable(precision: str, width: int) -> str:
    return share_of(unstable(window(precision, width)))


def alone_at(precision: str, rate: float) -> str:
    return f"{alone(pairs(rate))[list(PRECISIONS).index(precision)]} of {len(pairs(rate))}"


def by_rates() -> str:
    """Return MX mix's differences between the largest and the smallest rate, by data seed.

    The text has the smallest difference, and the range of the others.
    """
    found = list(findings(6).values())[3]
    least, *others = sorted(found.arm - found.baseline)
    return f"{least:.2f}, against {least_and_most(pd.Series(others), '.2f')}"


def wider() -> str:
    """Return how much more often MX mix diverges at width 768 than at 512, by data seed, averaged over rates."""
    return shown(replicas.difference(window("mx_mix", 768), window("mx_mix", 512), [LR]))


def lost(precision: str) -> pd.DataFrame:
    runs = window(precision)
    return runs[runs["diverged"] > 0]


def late(precision: str, step: int) -> str:
    return share_of(lost(precision)["outcome.diverged_at"] > step)


def back_in(precision: str) -> str:
    return back(window(precision))


def spikes(**of: Any) -> str:
    return f"{window(**of)['outcome.spikes'].sum():.0f}"


def dearer(width: int) -> str:
    """Return the least and the most, over rates, by which MX mix's stable runs end above FP32's in the median."""
    ends = []
    for precision in PRECISIONS:
        runs = window(precision, width)
        ends.append(runs[~unstable(runs)].groupby(LR)["loss"].median())
    return least_and_most(100 * (ends[1] / ends[0] - 1), ".0f") + " %"


WINDOW: Parts = {
    "verdicts": partial(verdicts, 6),
    "by rate": by_rate,
    "by data seed": by_data_seed,
    **{f"FP32 not stable at {width}": partial(not_stable, "fp32", width) for width in (512, 768)},
    **{name: partial(diverged, key) for key, name in PRECISIONS.items()},
    **{f"MX mix at {text}": partial(diverged, "mx_mix", rate=rate) for text, rate in RATES.items()},
    "at 2e-4": partial(diverged, rate=2e-4),
    "FP32 at 768 and 6e-4": partial(diverged, "fp32", 768, 6e-4),
    "first in FP32": lambda: f"{lost('fp32')['outcome.diverged_at'].min():,.0f}",
    "last in FP32": lambda: f"{lost('fp32')['outcome.diverged_at'].max():,.0f}",
    "MX mix minus FP32": partial(difference, 6, 2),
    "by rates": by_rates,
    "wider": wider,
    **{f"FP32 at {width}": partial(diverged, "fp32", width) for width in (512, 768)},
    **{
        f"{name} alone at {text}": partial(alone_at, key, RATES[text])
        for key, name in PRECISIONS.items()
        for text in ("4e-4", "6e-4")
    },
    "at 5e-4, one data seed": partial(students.only, "mx_mix", "lr 0.0005"),
    "late in MX mix": partial(late, "mx_mix", 4000),
    **{f"{name} comes back": partial(back_in, key) for key, name in PRECISIONS.items()},
    "spikes": spikes,
    "spikes in FP32 at 768 and 6e-4": partial(spikes, precision="fp32", width=768, rate=6e-4),
    **{f"price at {width}": partial(dearer, width) for width in (512, 768)},
    "runs": lambda: str(len(window())),
    "open": lambda: str(window()["open"].sum()),
}
