"""The parts of the page about figure 6 of the instability paper: learning rates of 2e-4 to 6e-4."""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis.pages.marks import Parts, share, steps, wilson
from analysis.pages.student_lots import DATA_SEED, SEED, difference, lot, verdicts
from mxstudy.results import markdown

RATE, WIDTH = "lr", "config.model.hidden_size"
PRECISIONS = {"fp32": "FP32", "mx_mix": "MX mix"}


def window(precision: str | None = None, width: int | None = None, rate: float | None = None) -> pd.DataFrame:
    runs = lot("learning_rate_window")
    for column, value in {"choice.precision": precision, WIDTH: width, RATE: rate}.items():
        runs = runs if value is None else runs[runs[column] == value]
    return runs


def by_rate() -> str:
    cells = []
    for width, rate in sorted({*window()[[WIDTH, RATE]].itertuples(index=False, name=None)}):
        own = [window(precision, width, rate) for precision in PRECISIONS]
        lost = [part["diverged"] > 0 for part in own]
        paired = [one.groupby([part[DATA_SEED], part[SEED]]).first() for one, part in zip(lost, own, strict=True)]
        both = pd.concat(paired, axis=1, keys=["fp32", "mix"], join="inner")
        medians = [steps(part["outcome.diverged_at"]) for part in own]
        cells.append(
            (
                int(width),
                f"{rate:.0e}".replace("e-0", "e-"),
                *(f"{share(one.sum(), len(one))} ({wilson(one.sum(), len(one))})" for one in lost),
                ", ".join(str(part["open"].sum()) for part in own),
                len(both),
                (both["fp32"] & ~both["mix"]).sum(),
                (both["mix"] & ~both["fp32"]).sum(),
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
            unstable = own["open"] | (own["diverged"] > 0)
            cells.append((f"{name}, width {width:.0f}", *(unstable[own[DATA_SEED] == seed].sum() for seed in seeds)))
    return markdown(["", *map(str, seeds)], cells, left=[""])


def unstable(precision: str, width: int) -> str:
    own = window(precision, width)
    return share((own["open"] | (own["diverged"] > 0)).sum(), len(own))


def diverged(precision: str, rate: float | None = None) -> str:
    own = window(precision, rate=rate)
    return share((own["diverged"] > 0).sum(), len(own))


WINDOW: Parts = {
    "verdicts": partial(verdicts, 6),
    "by rate": by_rate,
    "by data seed": by_data_seed,
    "FP32 not stable at 512": partial(unstable, "fp32", 512),
    "FP32 not stable at 768": partial(unstable, "fp32", 768),
    "MX mix": partial(diverged, "mx_mix"),
    "FP32": partial(diverged, "fp32"),
    "MX mix at 2e-4": partial(diverged, "mx_mix", 2e-4),
    "MX mix at 4e-4": partial(diverged, "mx_mix", 4e-4),
    "MX mix at 6e-4": partial(diverged, "mx_mix", 6e-4),
    "FP32 at 2e-4": partial(diverged, "fp32", 2e-4),
    "MX mix less FP32": partial(difference, 6, 2),
}
