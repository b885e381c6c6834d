"""Make the parts of the page about a 10M model on Tiny Shakespeare, from its runs' validation losses."""

from __future__ import annotations

from functools import cache

import pandas as pd

from analysis.pages.language_models import LOSS, PRECISION_CHOICE, PRECISIONS
from analysis.pages.marks import Parts, least_and_most, rows_of
from analysis.statistics import CONFIDENCE, student
from analysis.units import SEED
from mxstudy.results import markdown

TABLES = "shakespeare"


@cache
def lowest() -> pd.DataFrame:
    """Return each run's lowest validation loss and the number of steps before it, with its precision and seed."""
    runs = rows_of("runs", TABLES).set_index("fingerprint")[[PRECISION_CHOICE, SEED]]
    measured = rows_of("validation", TABLES)
    best = measured.loc[measured.groupby("fingerprint")[LOSS].idxmin()].set_index("fingerprint")
    return runs.join(best[[LOSS]].assign(steps=best["step"] + 1))


@cache
def by_seed(column: str) -> pd.DataFrame:
    """Return a column of `lowest` by precision (rows, in the order of PRECISIONS) and seed (columns)."""
    return lowest().pivot(index=PRECISION_CHOICE, columns=SEED, values=column).loc[list(PRECISIONS)]


def table() -> str:
    losses, steps = by_seed(LOSS), by_seed("steps")
    cells = [
        (
            PRECISIONS[precision],
            *(f"{losses.at[precision, seed]:.4f} (step {steps.at[precision, seed]:,.0f})" for seed in losses),
            f"{losses.loc[precision].mean():.4f}",
        )
        for precision in losses.index
    ]
    return markdown(
        ["lowest validation loss", *(f"seed {seed}" for seed in losses), "mean"], cells, left=["lowest validation loss"]
    )


def difference() -> str:
    """Return the mean of MXFP8's lowest loss minus bf16's, paired by seed, and its interval."""
    pairs = by_seed(LOSS).loc["mxfp8"] - by_seed(LOSS).loc["bf16"]
    low, high = student(pairs, CONFIDENCE)
    return f"{pairs.mean():+.4f} ({low:+.4f} .. {high:+.4f})"


def at_the_end() -> str:
    runs = rows_of("runs", TABLES)
    return least_and_most(runs[LOSS], ".2f")


SHAKESPEARE: Parts = {
    "lowest": table,
    "least and most": lambda: least_and_most(lowest()[LOSS], ".3f"),
    "difference": difference,
    "at the end": at_the_end,
}
