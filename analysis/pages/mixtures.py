"""Make the parts of the page about the step of a mixture of experts, from the JSON of benchmarks.experts."""

from __future__ import annotations

from functools import partial

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


def of_dense(arm: str) -> str:
    return f"{row('experts', arm=arm)['mfu_over_dense']:.2f}"


def at_least(arm: str) -> str:
    """Return the MFU over dense if the dense step were shorter and the mixture's longer, each by its spread."""
    own, dense = row("experts", arm=arm), row("experts", arm=arm.replace("experts", "dense"))
    longer, shorter = 1 + own["spread_ms"] / own["step_ms"], 1 - dense["spread_ms"] / dense["step_ms"]
    return f"{own['mfu_over_dense'] * shorter / longer:.2f}"


def over(arm: str, form: str = ".1f") -> str:
    one = row("experts", arm=arm)
    return plus_minus(one["over_bf16"], one["over_bf16_spread"], form)


def spreads() -> str:
    """Return the spread of a step in percent of the step, over all arms: the least and the most."""
    found = frame("experts")
    return least_and_most(100 * found["spread_ms"] / found["step_ms"], ".0f") + " %"


def millions(arm: str, column: str) -> str:
    return f"{row('experts', arm=arm)[column] / 1e6:.0f} million"


MIXTURES: Parts = {
    "steps": steps,
    **{f"{arm} of dense": partial(of_dense, arm) for arm in ARMS if arm.startswith("experts")},
    **{f"{arm} of dense, at least": partial(at_least, arm) for arm in ("experts, bf16", "experts, mxfp8")},
    **{f"{arm} over the mixture": partial(over, arm) for arm in ("loop, bf16", "loop, mxfp8")},
    "MXFP8 over bf16": partial(over, "experts, mxfp8", ".2f"),
    "dense over the mixture": partial(over, "dense, bf16", ".2f"),
    "spreads": spreads,
    "parameters": partial(millions, "experts, bf16", "parameters"),
    "active": partial(millions, "experts, bf16", "active_matmul_parameters"),
    "active of dense": partial(millions, "dense, bf16", "active_matmul_parameters"),
    "rounds": lambda: f"{row('experts', arm='experts, bf16')['rounds']}",
}
