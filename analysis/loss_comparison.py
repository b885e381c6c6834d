"""Losses of several arms over training, and their differences from the arm that each is compared with.

That arm is the baseline of the sweep or of --baseline, else the first arm. Lines: means over seeds; training losses are
smoothed by an exponential mean over 1 % of the steps. Bands: from the lowest to the highest seed; differences are taken
between runs of the same seed. Thin lines: runs that diverged, with a cross at their end; they are in no mean.

python -m analysis.loss_comparison --runs runs/convergence --only model=llama_8b
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, baseline_option, caption, check_baseline, figure_parser, load_chosen, plt, save
from mxstudy.results import curves_of, draw_arms, legend

# {value of --of: kind of rows, column of the loss in nats, title of the axis, conversion of the loss to what is drawn}
QUANTITIES: dict[str, tuple[str, str, str, Callable[[pd.DataFrame], pd.DataFrame]]] = {
    "training_loss": ("metrics", "loss", "training loss, nats a token", lambda loss: loss),
    "validation_perplexity": ("validation", "validation_loss", "validation perplexity", np.exp),
}


def draw(rows: pd.DataFrame, runs: pd.DataFrame, of: str) -> Figure:
    """Draw the figure. Raises ValueError if two runs of an arm have equal seeds."""
    _, column, title, convert = QUANTITIES[of]
    figure = plt.figure(figsize=(ONE_COLUMN, 1.3 * ONE_COLUMN))
    top, *_ = draw_arms(figure, curves_of(rows, runs, column, "tokens", smooth=of == "training_loss"), convert=convert)
    top.set_ylabel(title)
    legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("loss_comparison", __doc__)
    options.add_argument("--of", choices=QUANTITIES, default="training_loss")
    baseline_option(options)
    chosen = options.parse_args(arguments)
    rows, runs = load_chosen(options, chosen, QUANTITIES[chosen.of][0], "runs")
    check_baseline(options, chosen, runs)
    with options.usage_errors():
        figure = draw(rows, runs, chosen.of)
    save(figure, chosen, caption(rows, __doc__, chosen.runs))


if __name__ == "__main__":
    main()
