"""Make the parts of the page about several trainings on one GPU, from the JSON of benchmarks.side_by_side."""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis.pages.marks import Parts, benchmark, frame, least_and_most, rows, share_of
from analysis.pages.step_profile import (
    BUSY,
    GPU,
    MXFP8,
    idle_ms,
    kernels_ms,
    ms_of,
    name_of,
    profile,
    profiled_ms,
    step_ms,
)
from mxstudy.results import markdown

TARGET = 1.7e6  # tokens/s, set for an H200
LIMIT_W = 700  # the power limit of an H200
SAID = {"slices": "time slices", "mps": "MPS"}
NEWEST, SAME_BITS, OLDER = "side_by_side", "side_by_side_deterministic", "side_by_side_h100"
MEASURED = {NEWEST: "H200", SAME_BITS: "H200, deterministic", OLDER: "H100"}


def turns() -> str:
    """Return the table of the newest measurement's turns, with the tokens/s of the others beside it."""
    cells = [
        (
            SAID[one["sharing"]],
            one["runs"],
            *(rate(name, one["sharing"], one["runs"]) for name in MEASURED),
            f"{one['sm_mhz_median']:.0f}",
            f"{one['power_w_median']:.0f}",
        )
        for one in rows(NEWEST)
    ]
    columns = ["sharing", "processes", *(f"million tokens/s, {gpu}" for gpu in MEASURED.values())]
    columns += ["SM clock of the H200, MHz, median", "its power, W, median"]
    return markdown(columns, cells, left=columns[:1])


def millions(rate: float) -> str:
    return f"{rate / 1e6:.3f}"


def of(name: str, runs: str, sharing: str | None = None) -> pd.DataFrame:
    """Return the turns with that number of processes, such as '== 1' or '> 1', of one way of sharing or of both."""
    turns = frame(name).query(f"runs {runs}")
    return turns if sharing is None else turns[turns["sharing"] == sharing]


def rate(name: str, sharing: str, runs: int) -> str:
    """Return the million tokens/s of a turn, or '-' if there was none."""
    found = of(name, f"== {runs}", sharing)["tokens_per_s"]
    return millions(found.item()) if len(found) else "-"


def rates(name: str, runs: str, sharing: str | None = None) -> str:
    """Return the least and the most million tokens/s of these turns."""
    return least_and_most(of(name, runs, sharing)["tokens_per_s"] / 1e6, ".3f")


def best(name: str) -> float:
    return float(frame(name)["tokens_per_s"].max())


def mps_over_slices() -> str:
    """Return how many percent more tokens/s several processes make by MPS than as many in time slices."""
    mps, slices = (of(NEWEST, "> 1", sharing).set_index("runs")["tokens_per_s"] for sharing in ("mps", "slices"))
    return least_and_most(100 * (mps / slices - 1), ".0f") + " %"


def medians_by_mps(column: str) -> str:
    """Return the median readings of the turns of several processes by MPS: the least and the most."""
    return least_and_most(of(NEWEST, "> 1", "mps")[f"{column}_median"], ".0f")


def price_of_the_bits() -> str:
    """Return the percent of tokens/s that four processes by MPS lose with train.deterministic."""
    with_it, without = (of(name, "== 4", "mps")["tokens_per_s"].item() for name in (SAME_BITS, NEWEST))
    return f"{100 * (1 - with_it / without):.0f} %"


def same_bits(*names: str) -> str:
    """Return in how many comparisons all processes have the same bits. There is one for each way of sharing a GPU."""
    return share_of(pd.concat([frame(name).drop_duplicates("sharing")["same_bits"] for name in names]))


def percent_apart(values: pd.Series) -> str:
    """Return how far the largest value is above the least."""
    return f"{100 * (values.max() / values.min() - 1):.0f} %"


def joules_per_million(turns: pd.DataFrame) -> pd.Series:
    """Return the energy of a million tokens, by the median power."""
    return turns["power_w_median"] / turns["tokens_per_s"] * 1e6


# ------------------------------------------------------------------------------------------- the kernels of one step

MODEL = "llama_23m"


def per_second(ms: float) -> float:
    """Return the tokens/s of steps that take so many ms."""
    settings = benchmark(name_of(MODEL, GPU))["settings"]
    return float(settings["batch"] * settings["sequence"] / ms * 1e3)


def busy_ms() -> float:
    return sum(ms_of(MODEL, MXFP8)[group] for group in BUSY)


KERNELS: Parts = {
    "profile": partial(profile, MODEL),
    "kernels": lambda: f"{kernels_ms(MODEL, MXFP8):.1f}",
    "without gaps": lambda: f"{per_second(kernels_ms(MODEL, MXFP8)) / 1e6:.2f}",
    "best of the arithmetic": lambda: f"{100 * best(NEWEST) / per_second(kernels_ms(MODEL, MXFP8)):.0f} %",
    "ms of the target": lambda: f"{per_second(1) / TARGET:.1f}",
    "GEMMs and attention": lambda: f"{busy_ms():.1f}",
    "all else": lambda: f"{kernels_ms(MODEL, MXFP8) - busy_ms():.1f}",
    "no kernel runs": lambda: f"{idle_ms(MODEL, MXFP8):.1f}",
    "step, as timed": lambda: f"{step_ms(MODEL, MXFP8):.0f}",
    "step, as profiled": lambda: f"{profiled_ms(MODEL, MXFP8):.0f}",
}

SIDE_BY_SIDE: Parts = {
    **KERNELS,
    "turns": turns,
    "best": lambda: millions(best(NEWEST)),
    "best of the target": lambda: f"{100 * best(NEWEST) / TARGET:.0f} %",
    "more by MPS": partial(rates, NEWEST, "> 2", "mps"),
    "several in time slices": partial(rates, NEWEST, "> 1", "slices"),
    "alone": partial(rates, NEWEST, "== 1"),
    "alone apart": lambda: percent_apart(of(NEWEST, "== 1")["tokens_per_s"]),
    "MPS over time slices": mps_over_slices,
    "clock by MPS": partial(medians_by_mps, "sm_mhz"),
    "clock alone": lambda: least_and_most(of(NEWEST, "== 1")["sm_mhz_median"], ".0f"),
    "power by MPS": partial(medians_by_mps, "power_w"),
    "energy by MPS": lambda: least_and_most(joules_per_million(of(NEWEST, "> 1", "mps")), ".0f"),
    "energy of the target": lambda: f"{LIMIT_W / TARGET * 1e6:.0f}",
    "four, deterministic": partial(rate, SAME_BITS, "mps", 4),
    "price of the bits": price_of_the_bits,
    "same bits, deterministic": partial(same_bits, SAME_BITS),
    "same bits, not deterministic": partial(same_bits, NEWEST, OLDER),
    "H100: best": lambda: millions(best(OLDER)),
    "H100: several in time slices": partial(rates, OLDER, "> 1", "slices"),
    "H100: alone": partial(rates, OLDER, "== 1"),
}
