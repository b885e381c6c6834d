"""Training loss by tokens, one colour per arm: smoothed, the mean over seeds, a band from lowest to highest seed.

The smoothing is an exponential mean whose half-life is 1 % of the steps. Behind an arm of one run: its loss as it is.
Thin lines: runs that diverged, with a cross at their end. Below: the differences from the arm that each is compared
with, over the pairs of equal seeds.

python -m analysis.loss_curves --runs runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, make_figure, plt
from mxstudy.results import curves_of, draw_arms, legend


def draw(metrics: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Draw the figure. Raises ValueError if two runs of an arm have equal seeds."""
    figure = plt.figure(figsize=(ONE_COLUMN, 1.3 * ONE_COLUMN))
    raw, smooth = ({own.arm: own for own in curves_of(metrics, runs, "loss", "tokens", s)} for s in (False, True))
    top, *_ = draw_arms(figure, smooth.values(), raw)
    top.set_ylabel("training loss, nats a token")
    legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("loss_curves", __doc__, arguments, draw, "metrics", "runs")


if __name__ == "__main__":
    main()
