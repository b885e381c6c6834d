"""Losses of several arms over training, and their differences from the arm that each is compared with.

That is the baseline of the sweep or of --baseline, else the first arm. Lines: means over seeds; training losses are
smoothed by an exponential mean over 1 % of the steps. Bands: from the lowest to the highest seed; differences are taken
between runs of the same seed. Thin lines: runs that diverged, to a cross; they are in no mean.

python -m analysis.loss_comparison --runs runs/convergence --only model=llama_8b
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, caption, figure_parser, load_chosen, plt, save
from mxstudy.results import band, curves_of, draw_arm

# Value of --of -> kind of rows, column of the loss in nats, title of the axis, conversion of the loss to what is drawn.
QUANTITIES: dict[str, tuple[str, str, str, Callable[[pd.DataFrame], pd.DataFrame]]] = {
    "training_loss": ("metrics", "loss", "training loss, nats a token", lambda loss: loss),
    "validation_perplexity": ("validation", "validation_loss", "validation perplexity", np.exp),
}


def draw(rows: pd.DataFrame, runs: pd.DataFrame, of: str) -> Figure:
    """Draw the figure. Raises ValueError if two runs of an arm have equal seeds."""
    _, column, title, seen = QUANTITIES[of]
    arms = {own.arm: own for own in curves_of(rows, runs, column, "step", smooth=of == "training_loss")}
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(ONE_COLUMN, 1.3 * ONE_COLUMN), sharex=True)
    for name, own in arms.items():
        draw_arm(top, dataclasses.replace(own, alive=seen(own.alive), lost=seen(own.lost)))
        if own.partner in arms and own.partner != name:
            less = own.less(arms[own.partner])
            if less.shape[1]:
                band(bottom, less, own.color)
    bottom.axhline(0, color="black", linewidth=0.6)
    partners = {own.partner for own in arms.values()}
    bottom.set_title(f"less that of {partners.pop() if len(partners) == 1 else 'the baseline'}", fontsize=7)
    top.set(ylabel=title)
    bottom.set(xlabel="step", ylabel="difference of losses, nats")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", fontsize=7)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("loss_comparison", __doc__)
    options.add_argument("--of", choices=QUANTITIES, default="training_loss")
    options.add_argument("--baseline", metavar="GROUP=CHOICE", help="in place of the sweep's own, such as norm=rmsnorm")
    chosen = options.parse_args(arguments)
    rows, runs = load_chosen(options, chosen, QUANTITIES[chosen.of][0], "runs")
    group, _, choice = (chosen.baseline or "").partition("=")
    if group and not (runs.get(f"choice.{group}") == choice).any():
        options.error(f"--baseline: no run has {chosen.baseline}; there are {'; '.join(dict.fromkeys(runs['arm']))}")
    try:
        figure = draw(rows, runs, chosen.of)
    except ValueError as error:
        options.error(str(error))
    save(figure, chosen.name, caption(rows, __doc__, chosen.runs))


if __name__ == "__main__":
    main()
