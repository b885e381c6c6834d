"""RMS of every norm's output over training, one panel per run (MXNorm paper, figure 6).

A correct estimate gives 1 wherever exact RMSNorm does (dashed). Needs runs with probe=activations.

python -m analysis.mxnorm.fig06_norm_rms --runs runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import heading, make_figure, plt, rows_of_panels
from mxstudy import results

ABREAST = 4  # panels in a row, at most
EXACT = "with the exact RMS"


def abreast(panels: int) -> int:
    """Return how many panels stand in a row: the most that fill all rows, or ABREAST if only one would."""
    fitting = [width for width in range(2, ABREAST + 1) if panels % width == 0]
    return min(panels, max(fitting, default=ABREAST))


def draw(rows: pd.DataFrame) -> Figure:
    """Draw the figure. `rows` have name, tokens, and by depth each norm's `<norm>/rms` and `<norm>/rms_true`."""
    norms = [column.removesuffix("/rms") for column in rows if column.endswith("/rms")]
    runs = list(rows.groupby(["fingerprint", "name"], sort=False))
    width = abreast(len(runs))
    figure, panels = rows_of_panels(len(runs), width, 1.9, 0.5, sharex=True, sharey=True)
    depth = plt.cm.ScalarMappable(plt.Normalize(0, len(norms) - 1), "viridis")
    for axes, ((_, name), run) in zip(panels.flat, runs, strict=False):
        for norm, color in zip(norms, depth.to_rgba(np.arange(len(norms))), strict=True):
            axes.plot(run["tokens"], run[f"{norm}/rms_true"], "--", color="0.3", linewidth=0.6, zorder=3, label=EXACT)
            axes.plot(run["tokens"], run[f"{norm}/rms"], color=color)
        axes.set_title(heading(name), fontsize=8)
    lowest = panels.flat[max(0, len(runs) - width) : len(runs)]  # the lowest panel of each column
    results.in_tokens(*lowest)
    for axes in lowest:
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("RMS of the\nnorm's output")
    bar = figure.colorbar(depth, ax=panels, ticks=[0, len(norms) - 1], aspect=30)
    bar.ax.set_yticklabels([norms[0], norms[-1]], fontsize=7)
    results.legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_fig06_norm_rms", __doc__, arguments, draw, "norm_output_rms")


if __name__ == "__main__":
    main()
