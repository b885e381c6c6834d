"""Training loss (top) and gradient norm (bottom) of every run, one column per arm.

Colours show tokens per parameter, as in the instability paper, figures 1, 12 and 16 to 20. Cross: end of a diverged
run.

python -m analysis.instability.loss_and_gradient_norm --runs runs/olmo_precision_grid
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analysis.command import command
from analysis.style import ONE_COLUMN, TWO_COLUMNS, cross, heading, make_figure, plt
from mxstudy import results

SIZES = ("model.", "train.")  # keys about the size of a run, not about how it trains
ARMS_ABREAST = 4


def draw(runs: pd.DataFrame, metrics: pd.DataFrame) -> Figure:
    runs = results.with_arms(runs, but=SIZES)
    arms = list(runs.groupby("arm", sort=False))
    curves = dict(list(metrics.groupby("fingerprint")))
    ratio = metrics.groupby("fingerprint")["tokens"].max() / runs.set_index("fingerprint")["parameters"]
    colour = plt.cm.ScalarMappable(LogNorm(ratio.min() / 1.2, ratio.max() * 1.2), "viridis")
    abreast = min(len(arms), ARMS_ABREAST)
    lines = -(-len(arms) // abreast)
    size = (TWO_COLUMNS if abreast > 1 else ONE_COLUMN, 3.2 * lines)
    figure, panels = plt.subplots(2 * lines, abreast, figsize=size, sharex=True, sharey="row", squeeze=False)
    places = panels.reshape(lines, 2, abreast).transpose(0, 2, 1).reshape(-1, 2)
    for (top, bottom), (arm, own) in zip(places, arms, strict=False):
        top.set_title(heading(str(arm)), fontsize=7)
        for axes in (top, bottom):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        bottom.set_yscale("log")
        for one in own.to_dict("records"):
            color = colour.to_rgba(ratio[one["fingerprint"]])
            draw_run((top, bottom), curves[one["fingerprint"]], color, one["state"] == "diverged")
    for unused in places[len(arms) :].flat:
        unused.set_visible(False)
    results.in_tokens(*panels.flat, label="")
    for row in range(lines):
        panels[2 * row, 0].set_ylabel("training loss, nats")
        panels[2 * row + 1, 0].set_ylabel("gradient norm")
    figure.supxlabel("training tokens", fontsize=8)
    bar = figure.colorbar(colour, ax=panels, label="tokens per parameter", aspect=40)
    ticks = sorted({f"{tick:.2g}" for tick in np.geomspace(ratio.min(), ratio.max(), 5)}, key=float)
    bar.set_ticks([float(tick) for tick in ticks], labels=ticks)
    bar.minorticks_off()
    results.legend(figure)
    return figure


def draw_run(panels: tuple[Axes, Axes], curve: pd.DataFrame, color: np.ndarray, lost: bool) -> None:
    for axes, column in zip(panels, ("loss", "grad_norm"), strict=True):
        axes.plot(curve["tokens"], curve[column], color=color, linewidth=0.6)
        if lost:
            cross(axes, curve["tokens"], curve[column], color=color, markersize=4)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("loss_and_gradient_norm", __doc__, arguments, draw, "runs", "metrics")


if __name__ == "__main__":
    main()
