"""Make the parts of the page about the step of a mixture of experts, from the JSON of benchmarks.experts."""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis.pages.marks import Parts, benchmark, commit_of, least_and_most, row, rows
from analysis.pages.step_cost import reading
from mxstudy.results import markdown, plus_minus

ARMS = {
    "experts, bf16": "mixture, bf16, RMSNorm",
    "experts, mxfp8": "mixture, MXFP8, RMSNorm",
    "experts, mxfp8, mxnorm_p2": "mixture, MXFP8, MXNorm p=2",
    "loop, bf16": "expert after expert, bf16",
    "loop, mxfp8": "expert after expert, MXFP8",
    "dense, bf16": "dense model, bf16",
    "dense, mxfp8": "dense model, MXFP8",
}

OF_TENSORS = {  # arms whose operands have one scale for each expert's tensor, from a GPU with other trainings on it
    "experts, fp8_tensor": "mixture, fp8_tensor",
    "loop, fp8_tensor": "expert after expert, fp8_tensor",
    "dense, fp8_tensor": "dense model, fp8_tensor",
}
SHARED = "experts_shared"
QUIET = "experts"  # the measurement on a quiet host
DENSE = {  # {arm: that of the dense model in the same precision}
    "experts, bf16": "dense, bf16",
    "experts, mxfp8": "dense, mxfp8",
    "experts, mxfp8, mxnorm_p2": "dense, mxfp8",
}
PROFILED = ("experts, bf16", "experts, mxfp8", "dense, bf16", "dense, mxfp8")
MEASUREMENTS = {
    "experts_earlier": "earlier, on an H100 of a busy host",
    "experts_busy": "on an H100 of a busy host",
    "experts_busy_again": "later, on an H100 of a busy host",
    SHARED: "on an H100, beside two trainings on the same GPU",
    "experts_h200_before": "on an H200, a benchmark on another GPU of its host",
    QUIET: "above, on an H200 with nothing else on its host",
}


def steps() -> str:
    cells = []
    for one in rows(QUIET):
        cells.append(
            (
                ARMS[one["arm"]],
                plus_minus(one["step_ms"], one["spread_ms"], ".1f"),
                "1" if one["arm"] == "experts, bf16" else plus_minus(one["over_bf16"], one["over_bf16_spread"], ".2f"),
                f"{round(one['tokens_per_s'], -3):,.0f}",
                f"{one['mfu']:.3f}",
                f"{one['mfu_over_dense']:.2f}",
                f"{one['peak_gib']:.1f}",
                reading(one, "power_w"),
            )
        )
    columns = [
        "step of moe_200m",
        "ms, +- half the quartiles' range",
        "over the mixture in bf16",
        "tokens/s",
        "MFU",
        "MFU over dense",
        "peak, GiB",
        "power, W, least / median / largest",
    ]
    return markdown(columns, cells, left=columns[:1])


def steps_of_tensors() -> str:
    cells = []
    for arm, said in OF_TENSORS.items():
        one = row(SHARED, arm=arm)
        cells.append((said, plus_minus(one["step_ms"], one["spread_ms"], ".0f"), f"{one['mfu_over_dense']:.2f}"))
    return markdown(
        ["step of moe_200m", "ms, +- half the quartiles' range", "MFU over dense"], cells, left=["step of moe_200m"]
    )


def loop_over_grouped() -> str:
    """Return how many times as long as the grouped step that of the loop over experts takes, with scales of tensors."""
    grouped, loop = (row(SHARED, arm=f"{how}, fp8_tensor")["step_ms"] for how in ("experts", "loop"))
    return f"{loop / grouped:.1f}"


def of_dense(arm: str) -> str:
    return f"{row(QUIET, arm=arm)['mfu_over_dense']:.2f}"


def of_dense_by_spreads(arm: str, name: str = QUIET) -> str:
    """Return the MFU over dense if both steps were off by their spreads, against the mixture and for it."""
    own, dense = row(name, arm=arm), row(name, arm=DENSE[arm])
    found = own["mfu_over_dense"]
    off = [
        (1 + sign * dense["spread_ms"] / dense["step_ms"]) / (1 - sign * own["spread_ms"] / own["step_ms"])
        for sign in (-1, 1)
    ]
    return least_and_most(found * pd.Series(off), ".2f")


def busy(arm: str) -> float:
    """Return the share of a step in which the GPU runs a kernel, by the kernels of one profiled step."""
    one = row(QUIET, arm=arm)
    return float(one["kernels_ms"] / one["step_ms"])


def of_dense_without_waiting(arm: str) -> str:
    """Return the MFU over dense if both steps took as long as their kernels."""
    return f"{row(QUIET, arm=arm)['mfu_over_dense'] * busy(DENSE[arm]) / busy(arm):.2f}"


def over(arm: str) -> str:
    one = row(QUIET, arm=arm)
    return plus_minus(one["over_bf16"], one["over_bf16_spread"], ".1f")


def loops(arm: str) -> str:
    """Return how many times as long as the mixture in bf16 a loop over its experts takes, by measurement."""
    return least_and_most(pd.Series([row(name, arm=arm)["over_bf16"] for name in MEASUREMENTS]), ".1f")


def idle() -> str:
    """Return the share of a profiled step in which no kernel runs, by arm."""
    of = [benchmark(QUIET)["settings"]["waits"][arm] for arm in PROFILED]
    return ", ".join(f"{100 * one['idle_ms'] / one['step_ms']:.0f}" for one in of) + " %"


def waiting() -> str:
    cells = [
        (
            ARMS[arm],
            f"{row(QUIET, arm=arm)['step_ms']:.1f}",
            f"{row(QUIET, arm=arm)['kernels_ms']:.1f}",
            f"{100 * (1 - busy(arm)):.0f} %",
        )
        for arm in PROFILED
    ]
    return markdown(["step", "ms", "ms of its kernels", "without a kernel"], cells, left=["step"])


def measurements() -> str:
    cells = [
        (
            said,
            commit_of(name),
            *(
                text
                for arm in DENSE
                for text in (f"{row(name, arm=arm)['mfu_over_dense']:.2f}", of_dense_by_spreads(arm, name))
            ),
        )
        for name, said in MEASUREMENTS.items()
    ]
    columns = ["measurement", "commit", "bf16", "by the spreads", "MXFP8", "by its spreads", "with MXNorm", "by those"]
    return markdown(columns, cells, left=columns[:2])


def millions(arm: str, column: str) -> str:
    return f"{row(QUIET, arm=arm)[column] / 1e6:.0f} million"


MIXTURES: Parts = {
    "steps": steps,
    "waiting": waiting,
    "measurements": measurements,
    **{f"{arm} of dense": partial(of_dense, arm) for arm in ARMS if arm.startswith("experts")},
    **{f"{arm} of dense, by the spreads": partial(of_dense_by_spreads, arm) for arm in DENSE},
    **{f"{arm} of dense without waiting": partial(of_dense_without_waiting, arm) for arm in PROFILED[:2]},
    **{f"{arm} over the mixture": partial(over, arm) for arm in ("loop, bf16", "loop, mxfp8")},
    **{f"loops, {precision}": partial(loops, f"loop, {precision}") for precision in ("bf16", "mxfp8")},
    "steps of tensors": steps_of_tensors,
    "loop over grouped": loop_over_grouped,
    "idle": idle,
    "parameters": partial(millions, "experts, bf16", "parameters"),
    "active": partial(millions, "experts, bf16", "active_matmul_parameters"),
    "active of dense": partial(millions, "dense, bf16", "active_matmul_parameters"),
    "rounds": lambda: f"{row(QUIET, arm='experts, bf16')['rounds']}",
}
