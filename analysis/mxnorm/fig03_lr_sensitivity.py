"""Final loss by learning rate, one line per norm, one panel per model (MXNorm paper, figure 3 and section 4.1).

Top: mean validation loss, with a band from the lowest to the highest seed; crosses at the edge: diverged runs. Bottom:
highest minus lowest seed, the spread against which a difference between norms must be judged.

python -m analysis.mxnorm.fig03_lr_sensitivity --runs runs/lr_sensitivity
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, TWO_COLUMNS, caption, figure_parser, load_ended, plt, save
from analysis.units import RATE, need_columns, power
from mxstudy import results

MODEL, LOSS = "choice.model", "validation_loss"
SIZES = ("optimizer.lr", "model.", "train.")  # keys in which the runs of a line, or of a panel, may differ
BAND = "range of seeds"
WORDS = ("model", "norm", "best rate")
LOSSES = ("validation loss, 95 % interval (seeds)", "the paper's training loss")
# The training loss at the best rate, as section 4.1 prints it.
PRINTED = {
    ("llama_125m", "rmsnorm"): "3.090 ± 0.004",
    ("llama_125m", "mxnorm_p1"): "3.113 ± 0.012",
    ("llama_125m", "mxnorm_p2"): "3.116 ± 0.010",
    ("llama_1b", "rmsnorm"): "2.692 ± 0.011",
    ("llama_1b", "mxnorm_p1"): "2.684 ± 0.009",
    ("llama_1b", "mxnorm_p2"): "2.691 ± 0.007",
}


def draw(runs: pd.DataFrame) -> Figure:
    runs = results.with_arms(runs, but=SIZES)
    models = list(runs.groupby(MODEL, sort=False))
    width = ONE_COLUMN if len(models) == 1 else TWO_COLUMNS
    size, shares = (width, 1.2 * ONE_COLUMN), {"height_ratios": (2, 1)}
    figure, panels = plt.subplots(2, len(models), figsize=size, sharex="col", squeeze=False, gridspec_kw=shares)
    for (top, bottom), (model, own) in zip(panels.T, models, strict=True):
        for norm, arm in own.groupby("arm", sort=False):
            draw_line(top, bottom, arm, str(norm), arm["color"].iloc[0])
        top.set_title(f"{model}, {mark_of_seeds(own)}", fontsize=8)
        bottom.set_xscale("log", base=2)
        bottom.set_xlabel("learning rate")
        if own.groupby(["arm", RATE]).size().max() > 1:  # one seed has no range, and an empty panel no logarithm
            bottom.set_yscale("log")
    panels[0, 0].set_ylabel("final validation loss, nats")
    panels[1, 0].set_ylabel("range over\nseeds, nats")
    results.legend(figure)
    return figure


def draw_line(top: Axes, bottom: Axes, runs: pd.DataFrame, name: str, color: str) -> None:
    rates = runs.groupby(RATE)[LOSS].agg(["mean", "min", "max"])
    top.plot(rates.index, rates["mean"], "o-", markersize=3, color=color, label=name)
    top.fill_between(rates.index, rates["min"], rates["max"], color=color, alpha=0.2, linewidth=0, label=BAND)
    bottom.plot(rates.index, (rates["max"] - rates["min"]).where(lambda spread: spread > 0), "o-", ms=3, color=color)
    lost = runs.loc[runs["state"] == "diverged", RATE]
    if len(lost):
        at_the_edge: dict[str, Any] = {"transform": top.get_xaxis_transform(), "label": "diverged"}
        top.plot(lost, np.full(len(lost), 0.98), "x", color=color, **at_the_edge)


def mark_of_seeds(runs: pd.DataFrame) -> str:
    seeds = runs.groupby(["arm", RATE]).size()
    few, many = int(seeds.min()), int(seeds.max())
    return f"{few} seed{'s' * (many > 1)}" if few == many else f"{few} to {many} seeds"


def best(runs: pd.DataFrame) -> str:
    """Return Markdown: for each model and norm, the rate with the lowest mean loss, that loss, and the paper's."""
    rows = []
    arms = results.with_arms(runs, but=SIZES).dropna(subset=LOSS)
    for (model, norm), arm in arms.groupby([MODEL, "arm"], sort=False):
        losses = arm.groupby(RATE)[LOSS]
        rate = losses.mean().idxmin()
        printed = PRINTED.get((model, norm), "-")
        rows.append((model, norm, power(rate), results.estimate(losses.get_group(rate)).counted(".4f"), printed))
    return results.markdown(WORDS + LOSSES, rows, left=WORDS) + "\n"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("mxnorm_fig03_lr_sensitivity", __doc__)
    chosen = options.parse_args(arguments)
    (runs,) = load_ended(options, chosen, "runs")
    with options.usage_errors():
        need_columns(runs, [RATE, LOSS])
    save(draw(runs), chosen, f"{caption(runs, __doc__)}\n{best(runs)}")


if __name__ == "__main__":
    main()
