"""Limit of MXNorm's estimate for long rows, and bound of its output (MXNorm paper, Theorem 1, Lemmas 1 and 2).

Top: the estimate divided by the true RMS, by blocks per row, mean and one standard deviation over rows, with the limit
of each distribution by quadrature (dotted); and that standard deviation alone. Bottom: the largest |x / rms| with its
bound (outline), and the estimate divided by the true RMS, for a single spike, Gaussian rows, and Gaussian rows in which
four features are 10, 100 or 1000 times as large.

python -m analysis.mxnorm.theorem1_bounds --runs runs/approximation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.command import command
from analysis.mxnorm.fig02_approximation import ARMS
from analysis.style import TWO_COLUMNS, colors, load_last, make_figure, plt
from mxstudy.results import legend

DISTRIBUTIONS = {"laplace": "#E69F00", "gaussian": "#000000", "uniform": "#56B4E9"}
BAND = "one standard deviation"
POWERS = {1.0: ("o", "--"), 2.0: ("s", "-")}  # marker and line


def draw(convergence: pd.DataFrame, bounds: pd.DataFrame) -> Figure:
    figure, ((mean, spread), (reach, ratio)) = plt.subplots(2, 2, figsize=(TWO_COLUMNS, 4.8))
    draw_mean(mean, convergence)
    draw_spread(spread, convergence)
    draw_by_input(reach, bounds, "absmax", outline="bound")
    reach.set(ylabel="largest |x / rms|; outline: bound", yscale="log", ylim=(1, None))
    draw_by_input(ratio, bounds, "rms_ratio")
    ratio.axhline(1, color="black", linewidth=0.6)
    ratio.set(ylabel="norm's RMS over true RMS", yscale="log", yticks=(0.25, 0.5, 1, 2))
    ratio.set_yticklabels(["1/4", "1/2", "1", "2"])
    ratio.minorticks_off()
    legend(figure)
    return figure


def draw_mean(axes: Axes, rows: pd.DataFrame) -> None:
    for name, p, one, style in lines(rows):
        axes.plot(one["blocks"], one["mean"], label=f"{name}, p={p:g}", **style)
        low, high = one["mean"] - one["std"], one["mean"] + one["std"]
        axes.fill_between(one["blocks"], low, high, color=style["color"], alpha=0.1, linewidth=0, label=BAND)
        axes.axhline(one["limit"].iloc[0], color=style["color"], linestyle=":", linewidth=0.8, label="limit")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="blocks in a row", ylabel="estimate over true RMS", ylim=(0.6, 1.6))


def draw_spread(axes: Axes, rows: pd.DataFrame) -> None:
    for _, _, one, style in lines(rows):
        axes.plot(one["blocks"], one["std"], **style)
    blocks = np.array(sorted(rows["blocks"].unique()))
    law = 2 * rows.loc[rows["blocks"] == blocks[0], "std"].max() / np.sqrt(blocks / blocks[0])
    axes.plot(blocks, law, color="0.5", linewidth=0.8)
    axes.annotate("1 / √blocks", (blocks[len(blocks) // 2], 1.2 * law[len(law) // 2]), fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="blocks in a row", ylabel="standard deviation over rows", yscale="log")


def lines(rows: pd.DataFrame) -> list[tuple[str, float, pd.DataFrame, dict[str, Any]]]:
    """Return each distribution and p, with its rows sorted by blocks, and its line style."""
    found = []
    for name, color in DISTRIBUTIONS.items():
        for p, (marker, line) in POWERS.items():
            one = rows[(rows["distribution"] == name) & (rows["p"] == p)].sort_values("blocks")
            style = {"color": color, "marker": marker, "markersize": 2.5, "linestyle": line, "linewidth": 0.8}
            found.append((name, p, one, style))
    return found


def draw_by_input(axes: Axes, rows: pd.DataFrame, column: str, outline: str | None = None) -> None:
    """Draw one group of bars per input, one bar per norm."""
    color, inputs = colors(ARMS.values()), list(dict.fromkeys(rows["input"]))
    for i, (name, arm) in enumerate(ARMS.items()):
        one = rows[rows["norm"] == name].set_index("input").loc[inputs]
        places = np.arange(len(inputs)) + 0.27 * (i - 1)
        bottom = 0.0 if outline else 1.0  # bars of ratios start at 1, on a logarithmic axis
        axes.bar(places, one[column] - bottom, 0.25, bottom, color=color[arm], label=name)
        if outline:
            axes.bar(places, one[outline], 0.25, fill=False, edgecolor=color[arm], linewidth=0.8)
    axes.set_xticks(range(len(inputs)), [name.replace(" x ", "\nx ") for name in inputs], fontsize=6)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_theorem1_bounds", __doc__, arguments, draw, "convergence", "bounds", query=load_last)


if __name__ == "__main__":
    main()
