"""Training loss by tokens, one colour per arm: smoothed, the mean over seeds, a band from the lowest to the highest.

Behind an arm of one run: its raw loss. Thin lines: runs that diverged, to a cross.

python -m analysis.loss_curves --runs runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, make_figure, plt
from mxstudy.results import HALF_LIFE, curves_of, draw_arm


def draw(metrics: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    figure, axes = plt.subplots(figsize=(1.4 * ONE_COLUMN, ONE_COLUMN))
    curves = (curves_of(metrics, runs, "loss", "tokens", smooth) for smooth in (False, True))
    for raw, smooth in zip(*curves, strict=True):
        if raw.alive.shape[1] == 1:
            axes.plot(raw.alive, color=raw.color, alpha=0.2, linewidth=0.6)
        draw_arm(axes, smooth)
    axes.set(xlabel="training tokens", ylabel="training loss, nats a token")
    axes.legend(title=f"exponential mean, half-life {HALF_LIFE:.0%} of the steps")
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("loss_curves", __doc__, arguments, draw, "metrics", "runs")


if __name__ == "__main__":
    main()
