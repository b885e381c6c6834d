"""Effect of each format, scale rule and rounding on a tensor: gain, SQNR, last bin.

Gain: the slope of the decoded tensor against the original, minus 1; bars: two standard errors over draws. SQNR: signal
to quantisation noise. Last bin: elements beyond the format's max times the scale, which are clamped. Half away from
zero is shown for operands that were rounded to bf16 first, as in microxcaling: FP32 tensors have almost no ties.

python -m analysis.recipe.cast_quality --runs runs/approximation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.command import command
from analysis.style import TWO_COLUMNS, load_last, make_figure, plt
from mxstudy.results import legend

RULES = {"floor": "#D55E00", "ceil": "#E69F00", "even": "#56B4E9", "rceil": "#0072B2", "E4M3": "#009E73"}
SHIFTS = {"floor": -0.27, "ceil": -0.09, "even": 0.09, "rceil": 0.27, "E4M3": 0.0}  # horizontal offset of the points
ROUNDINGS = {  # {(rounding, pre_round): marker, name}
    ("even", False): ("o", "half to even"),
    ("away", True): ("^", "bf16 first, half away"),
}
TITLES = {
    "gaussian": "Gaussian",
    "gelu": "GELU of a Gaussian",
    "log_normal": "gains, exp(N(0, 0.02))",
    "gain 0.95 +- 0.02": "gains, N(0.95, 0.02)",
}


def draw(rows: pd.DataFrame) -> Figure:
    """Draw one row per quantity and one column per input. x: format, colour: scale rule, marker: rounding."""
    figure, panels = plt.subplots(3, len(TITLES), figsize=(TWO_COLUMNS, 5.2), sharex=True, sharey="row")
    formats = list(dict.fromkeys(rows["format"]))
    for (gain, sqnr, last_bin), (name, title) in zip(panels.T, TITLES.items(), strict=True):
        gain.set_title(title, fontsize=8)
        gain.axhline(0, color="black", linewidth=0.5)
        for style, places, one in series(rows[rows["input"] == name], formats):
            error = 200 * one["gain_standard_error"]
            gain.errorbar(places, 100 * (one["gain"] - 1), error, elinewidth=0.6, **style)
            sqnr.plot(places, one["sqnr_db"], **style)
            last_bin.plot(places, 100 * one["overflow"], **style)
        last_bin.set_xticks(range(len(formats)), formats, rotation=45, ha="right", rotation_mode="anchor")
    gain, sqnr, last_bin = panels[:, 0]
    in_percent(gain, "gain - 1, %", limits=(-30, 30))
    sqnr.set_ylabel("SQNR, dB")
    in_percent(last_bin, "last bin, % of elements", limits=(-0.02, 200))
    legend(figure, *entries())
    return figure


def series(rows: pd.DataFrame, formats: list[str]) -> list[tuple[dict[str, Any], pd.Series, pd.DataFrame]]:
    """Return, for each scale rule and rounding, the style of its points, their x, and its rows."""
    found = []
    for rule, color in RULES.items():
        for (rounding, pre_round), (marker, _) in ROUNDINGS.items():
            chosen = (rows["scale_rule"] == rule) & (rows["rounding"] == rounding) & (rows["pre_round"] == pre_round)
            one = rows[chosen]
            style = {"color": color, "marker": marker, "markersize": 3.5, "linestyle": "", "fillstyle": "none"}
            found.append((style | {"markeredgewidth": 0.8}, one["format"].map(formats.index) + SHIFTS[rule], one))
    return found


def in_percent(axes: Axes, label: str, limits: tuple[float, float]) -> None:
    """Make the axis logarithmic above 0.1 % and below -0.1 %, and linear between."""
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set(ylabel=label, ylim=limits)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def entries() -> list[plt.Line2D]:
    """Return the legend's entries: a colour for each scale rule, a marker for each rounding."""
    style: dict[str, Any] = {"linestyle": "", "markersize": 4}
    rules = [
        plt.Line2D([], [], color=color, marker="o", label=f"scale: {rule}", **style) for rule, color in RULES.items()
    ]
    black: dict[str, Any] = {"color": "black", "fillstyle": "none", **style}
    return [*rules, *(plt.Line2D([], [], marker=marker, label=name, **black) for marker, name in ROUNDINGS.values())]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("cast_quality", __doc__, arguments, draw, "quality", query=load_last)


if __name__ == "__main__":
    main()
