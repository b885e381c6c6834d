"""Gaps between a format's numbers, and shares of a language model's gains in the last bin, by their norm's role.

First panel: the distance from a number to the next, divided by the number, without subnormal ones; hatched: what is
clamped. Others, one per arm: gains that are larger than the format's largest number after division by the block scale,
by the paper's floor rule, whether the run casts gains or not. Lines: medians over layers and runs; bands: the smallest
and largest.

python -m analysis.instability.fig03_language --runs runs/olmo_gains
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.command import command
from analysis.instability.fig03_overflow import COUNT, formats
from analysis.ledger.arithmetic import codes
from analysis.style import heading, make_figure, rows_of_panels
from mxstudy.results import in_tokens, legend

GAINS = {  # the parts of gains' names that say what their norm precedes, and colours
    "before attention": (r"attention\.wqkv\.norm", "#0072B2"),
    "before the MLP": (r"feed_forward\..*norm", "#D55E00"),
    "of queries": (r"attention\.q_norm", "#009E73"),
    "of keys": (r"attention\.k_norm", "#CC79A7"),
}
COLUMNS = 4  # panels in a row


def draw(last_bin: pd.DataFrame) -> Figure:
    arms = dict([*last_bin.groupby("arm", sort=False)])
    figure, panels = rows_of_panels(1 + len(arms), COLUMNS, 1.7)
    first, *others = panels.flat
    draw_gaps(first, formats(last_bin))
    for axes in others[1:]:
        axes.sharey(others[0])
    for axes, (arm, rows) in zip(others, arms.items(), strict=False):
        axes.set_title(heading(arm), fontsize=6)
        for kind, (_, color) in GAINS.items():
            shares = shares_of(rows, kind).groupby("tokens").agg(["median", "min", "max"])
            axes.plot(shares["median"], color=color, label=kind)
            axes.fill_between(
                shares.index, shares["min"], shares["max"], color=color, alpha=0.2, linewidth=0, label="least to most"
            )
        in_tokens(axes)
        axes.set_ylim(0, None)
    others[0].set_ylabel("gains in\nthe last bin, %")
    legend(figure)
    return figure


def shares_of(rows: pd.DataFrame, kind: str) -> pd.Series:
    """Return the shares of the gains of one kind in percent, one for each layer and row, by tokens."""
    pattern, _ = GAINS[kind]
    shares = 100 * rows.set_index("tokens").filter(regex=rf"^layers\.\d+\.{pattern}\.weight/{COUNT}$")
    return shares.stack().droplevel(1)


def draw_gaps(axes: Axes, names: Sequence[str]) -> None:
    """Draw the relative gaps of the formats by which the gains were measured."""
    for name in names:
        normal = codes(name)[2 ** int(name[-1]) - 1 :]
        (line,) = axes.step(normal[:-1], 100 * np.diff(normal) / normal[:-1], where="post", linewidth=0.8, label=name)
        axes.axvspan(normal[-1], 2 * normal[-1], facecolor="none", edgecolor=line.get_color(), hatch="///", linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="number", ylabel="gap to the next, %", ylim=(0, None))


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("instability_fig03_language", __doc__, arguments, draw, "last_bin")


if __name__ == "__main__":
    main()
