"""Training loss by tokens, one line per run: smoothed in front, raw behind.

python -m analysis.loss_curves --runs runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.style import ONE_COLUMN, colors, make_figure, plt
from mxstudy.results import HALF_LIFE, smoothed


def draw(metrics: pd.DataFrame) -> Figure:
    figure, axes = plt.subplots(figsize=(1.4 * ONE_COLUMN, ONE_COLUMN))
    color = colors(metrics["label"])
    for (_, label), run in metrics.groupby(["fingerprint", "label"], sort=False):
        axes.plot(run["tokens"], run["loss"], color=color[label], alpha=0.2, linewidth=0.6)
        axes.plot(run["tokens"], smoothed(run["loss"]), color=color[label], label=label)
    axes.set(xlabel="training tokens", ylabel="training loss, nats a token")
    axes.legend(title=f"exponential mean, half-life {HALF_LIFE:.0%} of the steps")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("loss_curves", __doc__, arguments, draw, "metrics")


if __name__ == "__main__":
    main()
