"""Make the parts of the page about the step of a mixture of experts, from the JSON of benchmarks.experts."""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis.pages.marks import Parts, frame, least_and_most, row, rows
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

NEWER, EARLIER = "experts", "experts_earlier"  # measurements
SHARES = ("experts, bf16", "experts, mxfp8")


def steps() -> str:
    cells = []
    for one in rows("experts"):
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


def of_dense(arm: str, name: str = NEWER) -> str:
    return f"{row(name, arm=arm)['mfu_over_dense']:.2f}"


def least_and_most_of_dense(arm: str, name: str = NEWER) -> str:
    """Return the MFU over dense if both steps were off by their spreads, against the mixture and for it."""
    own, dense = row(name, arm=arm), row(name, arm=arm.replace("experts", "dense"))
    found = own["mfu_over_dense"]
    off = [
        (1 + sign * dense["spread_ms"] / dense["step_ms"]) / (1 - sign * own["spread_ms"] / own["step_ms"])
        for sign in (-1, 1)
    ]
    return least_and_most(found * pd.Series(off), ".2f")


def over(arm: str, form: str = ".1f") -> str:
    one = row("experts", arm=arm)
    return plus_minus(one["over_bf16"], one["over_bf16_spread"], form)


def spreads(name: str) -> str:
    """Return the spread of a step in percent of the step, over all arms: the least and the most."""
    found = frame(name)
    return least_and_most(100 * found["spread_ms"] / found["step_ms"], ".0f") + " %"


def millions(arm: str, column: str) -> str:
    return f"{row('experts', arm=arm)[column] / 1e6:.0f} million"


def ms(arm: str, name: str) -> str:
    one = row(name, arm=arm)
    return plus_minus(one["step_ms"], one["spread_ms"], ".0f")


def idle_power(name: str) -> str:
    """Return the least reading of the power of each arm: the least and the most of them."""
    return least_and_most(frame(name)["power_w_min"], ".0f")


MIXTURES: Parts = {
    "steps": steps,
    **{f"{arm} of dense": partial(of_dense, arm) for arm in ARMS if arm.startswith("experts")},
    **{f"{arm} of dense, by the spreads": partial(least_and_most_of_dense, arm) for arm in SHARES},
    **{f"{arm} of dense, earlier": partial(of_dense, arm, EARLIER) for arm in SHARES},
    **{f"{arm} of dense, by the spreads, earlier": partial(least_and_most_of_dense, arm, EARLIER) for arm in SHARES},
    **{f"{arm} over the mixture": partial(over, arm) for arm in ("loop, bf16", "loop, mxfp8")},
    **{
        f"{arm}, ms{said}": partial(ms, arm, name)
        for arm in ("experts, bf16", "dense, bf16")
        for said, name in (("", NEWER), (", earlier", EARLIER))
    },
    "spreads": partial(spreads, NEWER),
    "spreads, earlier": partial(spreads, EARLIER),
    "idle power": partial(idle_power, NEWER),
    "idle power, earlier": partial(idle_power, EARLIER),
    "parameters": partial(millions, "experts, bf16", "parameters"),
    "active": partial(millions, "experts, bf16", "active_matmul_parameters"),
    "active of dense": partial(millions, "dense, bf16", "active_matmul_parameters"),
    "rounds": lambda: f"{row(NEWER, arm='experts, bf16')['rounds']}",
    "rounds, earlier": lambda: f"{row(EARLIER, arm='experts, bf16')['rounds']}",
}
