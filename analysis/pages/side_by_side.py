"""Make the parts of the page about several trainings on one GPU, from the JSON of benchmarks.side_by_side."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from analysis.pages.marks import Parts, benchmark, frame, least_and_most, rows, share_of
from analysis.pages.step_cost import reading
from analysis.pages.step_profile import BF16, BUSY, MXFP8, kernels_ms, ms_of, name_of, profile, step_ms
from mxstudy.results import markdown

SAID = {"slices": "time slices", "mps": "MPS"}


def turns() -> str:
    cells = [
        (
            SAID[one["sharing"]],
            one["runs"],
            millions(one["tokens_per_s"]),
            f"{millions(one['least_of_one'])} .. {millions(one['most_of_one'])}",
            "yes" if one["same_bits"] else "no",
            reading(one, "sm_mhz"),
            reading(one, "power_w"),
        )
        for one in rows("side_by_side")
    ]
    columns = ["sharing", "processes", "million tokens/s, all together", "of one, least .. most", "same bits"]
    columns += ["SM clock, MHz, least / median / largest", "power, W, least / median / largest"]
    return markdown(columns, cells, left=columns[:1])


def millions(rate: float) -> str:
    return f"{rate / 1e6:.3f}"


def best() -> dict[str, Any]:
    return max(rows("side_by_side"), key=lambda one: float(one["tokens_per_s"]))


def alone() -> pd.Series:
    """Return the tokens/s of one process, as measured each way."""
    return frame("side_by_side").query("runs == 1")["tokens_per_s"]


def of_several(sharing: str, column: str) -> pd.Series:
    """Return a column of the turns of several processes."""
    return frame("side_by_side").query("sharing == @sharing and runs > 1")[column]


def clock(sharing: str) -> str:
    """Return the median SM clocks of the turns of several processes: the least and the most."""
    return least_and_most(of_several(sharing, "sm_mhz_median"), ".0f")


# ------------------------------------------------------------------------------------------- the kernels of one step

MODEL, GPU, TARGET = "llama_23m", "H100", 1.7e6  # tokens/s, set for an H200
ON_THE_H200 = "llama_1b", "H200"  # the newest steps there beside which a copy was measured


def tokens() -> int:
    settings = benchmark(name_of(MODEL, GPU))["settings"]
    return int(settings["batch"] * settings["sequence"])


def busy_ms() -> float:
    return sum(ms_of(MODEL, MXFP8, GPU)[group] for group in BUSY)


def target_ms() -> float:
    """Return the ms of a step that makes as many tokens a second as is the target."""
    return tokens() / TARGET * 1e3


def rest_ms() -> float:
    """Return the ms of all kernels but GEMMs and attention."""
    return kernels_ms(MODEL, MXFP8, GPU) - busy_ms()


def copied(model: str, gpu: str) -> float:
    """Return the TB/s of a copy beside the steps of a model."""
    return float(benchmark(name_of(model, gpu))["settings"]["copied_bytes_per_s"] / 1e12)


def h200_rest_ms() -> float:
    """Return the ms of all kernels but GEMMs and attention on an H200, if they gain as much as a copy does."""
    return rest_ms() * copied(MODEL, GPU) / copied(*ON_THE_H200)


KERNELS: Parts = {
    "profile": partial(profile, MODEL, (GPU,), (BF16, MXFP8)),
    "kernels": lambda: f"{kernels_ms(MODEL, MXFP8, GPU):.1f}",
    "as timed": lambda: f"{step_ms(MODEL, MXFP8, GPU):.1f}",
    "without gaps": lambda: millions(tokens() / kernels_ms(MODEL, MXFP8, GPU) * 1e3),
    "ms of the target": lambda: f"{target_ms():.1f}",
    "GEMMs and attention": lambda: f"{busy_ms():.1f}",
    "all else": lambda: f"{rest_ms():.1f}",
    "left to all else": lambda: f"{target_ms() - busy_ms():.1f}",
    "faster": lambda: f"{rest_ms() / (target_ms() - busy_ms()):.2f}",
    "copy, H100": lambda: f"{copied(MODEL, GPU):.2f}",
    "copy, H200": lambda: f"{copied(*ON_THE_H200):.2f}",
    "all else, H200": lambda: f"{h200_rest_ms():.1f}",
    "step, H200": lambda: f"{busy_ms() + h200_rest_ms():.1f}",
    "H200 without gaps": lambda: f"{tokens() / (busy_ms() + h200_rest_ms()) / 1e3:.2f}",
    "commit of the profile": lambda: f"`{benchmark(name_of(MODEL, GPU))['provenance']['commit']}`",
}

SIDE_BY_SIDE: Parts = {
    **KERNELS,
    "turns": turns,
    "best": lambda: millions(best()["tokens_per_s"]),
    "alone": lambda: least_and_most(alone() / 1e6, ".3f"),
    "best over one": lambda: least_and_most(best()["tokens_per_s"] / alone(), ".2f"),
    "alone apart": lambda: f"{100 * (alone().max() / alone().min() - 1):.0f} %",
    "several in time slices": lambda: least_and_most(of_several("slices", "tokens_per_s") / 1e6, ".3f"),
    "power": lambda: least_and_most(frame("side_by_side")["power_w_median"], ".0f"),
    **{f"clock of several, {sharing}": partial(clock, sharing) for sharing in SAID},
    "same bits": lambda: share_of(frame("side_by_side")["same_bits"]),
    "different bits": lambda: share_of(~frame("side_by_side")["same_bits"]),
}
