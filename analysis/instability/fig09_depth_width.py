"""Spikes (top) and divergence (bottom) by depth and width, one column per precision (instability paper, figure 9).

Spikes: losses over 100 times the one before, mean over replicas. Divergence: share of the replicas whose loss stays
over 10 times its best for more than 500 steps; each cell shows their number, out of all.

python -m analysis.instability.fig09_depth_width --runs runs/depth_width
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from analysis.command import command
from analysis.students.arms import ended_replicas, named, of_arms, sorted_arms, table
from analysis.style import ONE_COLUMN, TWO_COLUMNS, figure_parser, load_chosen, plt, save
from analysis.units import DEPTH, WIDTH


def draw(runs: pd.DataFrame) -> Figure:
    precision = named(runs, ["precision"])
    names = sorted_arms(precision)
    sizes = runs.groupby([precision, DEPTH, WIDTH])
    spikes, lost = sizes["outcome.spikes"].mean(), sizes["diverged"].agg(["mean", "sum", "count"])
    size = (TWO_COLUMNS if len(names) > 1 else ONE_COLUMN, 4.4)
    figure, panels = plt.subplots(2, len(names), figsize=size, squeeze=False, sharex=True, sharey=True)
    for (top, bottom), name in zip(panels.T, names, strict=True):
        top.set_title(name, fontsize=8)
        cells = lost.loc[name].apply(lambda cell: f"{cell['sum']:.0f}/{cell['count']:.0f}", axis=1)
        many = heat(top, spikes[name], spikes[name].map("{:.2g}".format), max(1.0, spikes.max()))
        share = heat(bottom, lost.loc[name, "mean"], cells, 1.0)
        bottom.set_xlabel("width")
    for axes, image, title in ((panels[0], many, "spikes in a replica"), (panels[1], share, "share diverged")):
        axes[0].set_ylabel("depth, blocks")
        figure.colorbar(image, ax=list(axes), label=title, aspect=15)
    return figure


def heat(axes: Axes, values: pd.Series, texts: pd.Series, top: float) -> AxesImage:
    """Draw values by depth and width as colours from 0 to `top`, with a text in each cell."""
    table, words = values.unstack(), texts.unstack()
    image = axes.imshow(table.to_numpy(), cmap="Reds", vmin=0, vmax=top, aspect="auto", origin="lower")
    axes.set_xticks(range(table.shape[1]), [f"{width:g}" for width in table.columns])
    axes.set_yticks(range(table.shape[0]), [f"{depth:g}" for depth in table.index])
    axes.grid(False)
    for (i, j), value in np.ndenumerate(table.to_numpy()):
        if np.isfinite(value) or isinstance(words.iloc[i, j], str):
            color = "white" if value > 0.6 * top else "black"
            axes.text(j, i, words.iloc[i, j], ha="center", va="center", fontsize=7, color=color)
    return image


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("instability_fig09_depth_width", __doc__)
    chosen = options.parse_args(arguments)
    (runs,) = load_chosen(options, chosen, "runs")
    runs = ended_replicas(runs)
    arms = named(runs, ["precision", "model.num_layers", "model.hidden_size"])
    save(draw(runs), chosen, f"{of_arms(runs, arms, __doc__)}\n{table(runs, arms)}")


if __name__ == "__main__":
    main()
