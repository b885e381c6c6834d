"""Draw how well MXNorm approximates RMSNorm (MXNorm paper, figure 2).

Left: block scales after each norm (bars side by side, Gaussian rows of all standard deviations together), and of the
same rows without a norm (grey, by standard deviation). Middle: elements before scaling, as a density: after a norm,
all standard deviations give the same. Right: r^2 of the decoded tensors against RMSNorm + MXCast, by blocks per row;
bars: one standard deviation over draws.

python -m analysis.mxnorm.fig02_approximation --runs runs/approximation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

from analysis.command import command
from analysis.style import TWO_COLUMNS, colors, load_last, make_figure, plt
from mxstudy.results import legend

ARMS = {"RMSNorm": "rmsnorm", "MXNorm p=1": "mxnorm_p1", "MXNorm p=2": "mxnorm_p2"}  # keys of results.KNOWN
DASHES = ("-", "--", ":")
MISSING = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)  # 1 - r^2 at the ticks of the axis
GREYS = ("0.35", "0.55", "0.7")


def draw(distributions: pd.DataFrame, fidelity: pd.DataFrame) -> Figure:
    figure, (scales, elements, right) = plt.subplots(1, 3, figsize=(TWO_COLUMNS, 2.7), width_ratios=(3, 3, 2.6))
    draw_scales(scales, distributions[distributions["quantity"] == "scale exponent"])
    draw_elements(elements, distributions[distributions["quantity"] == "element"])
    draw_fidelity(right, fidelity)
    legend(figure)
    return figure


def draw_scales(axes: Axes, rows: pd.DataFrame) -> None:
    color = colors(ARMS.values())
    for std, one in rows[rows["norm"] == "no norm"].groupby("std"):
        shares = one.groupby("value")["count"].sum() / one["count"].sum()
        axes.bar(shares.index, shares, width=0.94, color="0.85")
        axes.annotate(f"std {std:g}", (shares.idxmax(), 1.15), ha="center", fontsize=6, color="0.35")
    for i, (name, arm) in enumerate(ARMS.items()):
        counts = rows[rows["norm"] == name].groupby("value")["count"].sum()
        axes.bar(counts.index + 0.27 * (i - 1), counts / counts.sum(), width=0.25, color=color[arm])
    axes.set(xlabel="scale of a block, k of 2ᵏ", ylabel="share of blocks", yscale="log", ylim=(None, 2.5))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def draw_elements(axes: Axes, rows: pd.DataFrame) -> None:
    color = colors(ARMS.values())
    for i, (std, one) in enumerate(rows[rows["norm"] == "no norm"].groupby("std")):
        style: dict[str, Any] = {"color": GREYS[i % len(GREYS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": 0.8}
        axes.stairs(*density(one), baseline=None, label=f"no norm, std {std:g}", **style)
    for i, (name, arm) in enumerate(ARMS.items()):
        after = rows[rows["norm"] == name]
        style = {"color": color[arm], "linestyle": DASHES[i], "linewidth": 1.8 - 0.4 * i}
        axes.stairs(*density(after), baseline=None, label=name, **style)
    top = rows["value"].abs().max()
    axes.set(xlabel="element before its scale", ylabel="density", xticks=np.linspace(-top, top, 3), ylim=(0, None))


def density(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of elements per unit of value, in bins of half the grid's widest step, and the bins' edges.

    A value of the grid stands for all numbers that round to it, spread evenly between the midpoints to its neighbours.
    """
    counts = rows.groupby("value")["count"].sum()
    values = counts.index.to_numpy()
    middles = (values[1:] + values[:-1]) / 2
    cells = np.concatenate(([2 * values[0] - middles[0]], middles, [2 * values[-1] - middles[-1]]))
    width = np.diff(values).max() / 2
    edges = np.arange(np.floor(cells[0] / width), np.ceil(cells[-1] / width) + 1) * width
    below = np.interp(edges, cells, np.concatenate(([0], np.cumsum(counts))) / counts.sum())
    return np.diff(below) / width, edges


def draw_fidelity(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw 1 - r^2 on a logarithmic axis that points downwards, labelled with r^2."""
    color, sizes = colors(ARMS.values()), sorted(rows["block_size"].unique())
    for (block_size, p), one in rows.groupby(["block_size", "p"]):
        spread = one.groupby("blocks")["r_squared"].agg(["mean", "std"])
        style: dict[str, Any] = {
            "color": color[f"mxnorm_p{p:g}"],
            "linestyle": DASHES[sizes.index(block_size)],
            "linewidth": 0.9,
        }
        axes.errorbar(spread.index, 1 - spread["mean"], spread["std"], label=f"p={p:g}, B={block_size}", **style)
    axes.set_xscale("log", base=4)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(yscale="log", xlabel="blocks of B in a row", ylabel="r²")
    axes.invert_yaxis()
    high, low = axes.get_ylim()
    axes.set_yticks([missing for missing in MISSING if low < missing < high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda missing, _: f"{1 - missing:g}"))
    axes.minorticks_off()


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_fig02_approximation", __doc__, arguments, draw, "distributions", "fidelity", query=load_last)


if __name__ == "__main__":
    main()
