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
from analysis.style import ONE_COLUMN, make_figure, plt


def draw(rows: pd.DataFrame) -> Figure:
    """Draw the figure. `rows`: name, step, and `<norm>/rms` and `<norm>/rms_true` of each norm in order of depth."""
    norms = [column.removesuffix("/rms") for column in rows if column.endswith("/rms")]
    runs = list(rows.groupby(["fingerprint", "name"], sort=False))
    size = (0.55 * ONE_COLUMN * len(runs) + 0.6, 0.75 * ONE_COLUMN)
    figure, panels = plt.subplots(1, len(runs), figsize=size, sharey=True, squeeze=False)
    depth = plt.cm.ScalarMappable(plt.Normalize(0, len(norms) - 1), "viridis")
    for axes, ((_, name), run) in zip(panels[0], runs, strict=True):
        for norm, color in zip(norms, depth.to_rgba(np.arange(len(norms))), strict=True):
            axes.plot(run["step"], run[f"{norm}/rms_true"], "--", color="0.6", linewidth=0.6)
            axes.plot(run["step"], run[f"{norm}/rms"], color=color)
        axes.set(title=name.replace(" ", "\n"), xlabel="step")
    panels[0, 0].set_ylabel("RMS of the norm's output")
    bar = figure.colorbar(depth, ax=panels[0, -1], ticks=[0, len(norms) - 1])
    bar.ax.set_yticklabels([norms[0], norms[-1]])
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_fig06_norm_rms", __doc__, arguments, draw, "norm_output_rms")


if __name__ == "__main__":
    main()
