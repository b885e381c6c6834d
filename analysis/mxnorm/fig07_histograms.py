"""Histograms of the norms' inputs and outputs at the last step, with the bound on the output (MXNorm paper, figure 7).

A run has the colour of its arm. Its vertical line is the bound of x / rms (Lemmas 1 and 2). Needs runs with
probe=activations.

python -m analysis.mxnorm.fig07_histograms --runs runs/quickstart --norms layers.0.attention_norm norm
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import TWO_COLUMNS, caption, figure_parser, load_chosen, plt, save
from mxstudy.results import bin_edges, legend

LINEAR_BELOW = 2.0**-6  # the axis is linear for magnitudes below it, logarithmic above
TICKS = (-100.0, -1.0, 0.0, 1.0, 100.0)


def shares(counts: Sequence[float]) -> np.ndarray:
    """Return the share of all elements in each bin."""
    return np.asarray(counts) / np.sum(counts)


def drawn_edges() -> np.ndarray:
    """Return the bins' edges for drawing. The outermost bins, which reach to infinity, are drawn one octave wide."""
    edges = bin_edges()
    return np.concatenate(([2 * edges[1]], edges[1:-1], [2 * edges[-2]]))


def draw(rows: pd.DataFrame, norms: Sequence[str]) -> Figure:
    """Draw the figure.

    `rows` has one row per run, with arm, color, `<norm>/input` and `<norm>/output` (counts by bin), and `<norm>/bound`.
    """
    size = (TWO_COLUMNS, 1.5 * len(norms) + 0.6)
    figure, panels = plt.subplots(len(norms), 2, figsize=size, sharex=True, sharey=True, squeeze=False)
    edges, reach = drawn_edges(), 2 * farthest(rows, norms)
    for norm, row_of_panels in zip(norms, panels, strict=True):
        for side, axes in zip(("input", "output"), row_of_panels, strict=True):
            for run in rows.to_dict("records"):
                axes.stairs(shares(run[f"{norm}/{side}"]), edges, color=run["color"], label=run["arm"])
                if side == "output":
                    for bound in (-run[f"{norm}/bound"], run[f"{norm}/bound"]):
                        axes.axvline(bound, color=run["color"], linestyle=":", linewidth=0.8, label="bound")
            axes.set_title(f"{norm}: {side}", fontsize=8)
            axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=0.5)
            axes.set(yscale="log", xticks=TICKS, xlim=(-reach, reach))
    figure.supylabel("share of all elements,\nin bins of a quarter octave", fontsize=8)
    figure.supxlabel("value of an element", fontsize=8)
    legend(figure)
    return figure


def farthest(rows: pd.DataFrame, norms: Sequence[str]) -> float:
    """Return the largest magnitude that any of these histograms or bounds reaches."""
    counts = np.sum([np.stack(rows[f"{norm}/{side}"]) for norm in norms for side in ("input", "output")], axis=(0, 1))
    filled = np.flatnonzero(counts)
    edges = drawn_edges()
    return max(-edges[filled[0]], edges[filled[-1] + 1], *(rows[f"{norm}/bound"].max() for norm in norms))


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("mxnorm_fig07_histograms", __doc__)
    options.add_argument("--norms", nargs="+", metavar="NAME", help="the first, the middle and the last if not given")
    chosen = options.parse_args(arguments)
    (rows,) = load_chosen(options, chosen, "activation_histograms")
    norms = [column.removesuffix("/input") for column in rows if column.endswith("/input")]
    for norm in set(chosen.norms or []) - set(norms):
        options.error(f"--norms: no norm is called {norm}; choose from {', '.join(norms)}")
    picked = chosen.norms or [norms[0], norms[len(norms) // 2], norms[-1]]
    last = rows.groupby("fingerprint", sort=False).tail(1)
    save(draw(last, picked), chosen, caption(last, __doc__, chosen.runs))


if __name__ == "__main__":
    main()
