"""Losses by learning rate and precision, coloured by the student's size (instability paper, figure 6).

Lines: medians over the replicas of a size. Thin lines: the replicas that diverged, with a cross where they stop being
finite; their number is above each panel. A cosine schedule goes from the given rate down to a hundredth of it.

python -m analysis.instability.fig06_learning_rate_grid --runs runs/learning_rate_grid
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from analysis.command import command
from analysis.students.arms import REPLICA, alone, by_pair, ended_replicas, named, of_arms, sorted_arms, table
from analysis.students.curves import band, grid, limit, loss_label, losses_by_replica, lost_lines, note, said_of
from analysis.style import figure_parser, load_chosen, plt, save
from analysis.units import DEPTH, SEEDS, WIDTH
from mxstudy import results

KEY = ("rate", DEPTH, WIDTH, *SEEDS)  # what a pair agrees in
COLUMNS = ("rate", "pairs", "more in one", "more in the other", "exact sign test")


def rates(runs: pd.DataFrame) -> pd.Series:
    cosine = runs["config.schedule.kind"] == "cosine"
    return cosine.map({True: "cosine ", False: ""}) + runs["lr"].map("lr {:g}".format)


def sizes(runs: pd.DataFrame) -> pd.Series:
    return runs[DEPTH].astype(int).map("L = {}".format) + runs[WIDTH].astype(int).map(", D = {}".format)


def draw(runs: pd.DataFrame, metrics: pd.DataFrame) -> Figure:
    rate, size, precision = rates(runs), sizes(runs), named(runs, ["precision"])
    order = (runs[DEPTH] * runs[WIDTH] ** 2).groupby(size).first().sort_values(kind="stable").index
    hues = plt.cm.plasma_r([0.12 + 0.88 * i / len(order) for i in range(len(order))])
    color = dict(zip(order, map(tuple, hues), strict=True))
    rows, columns = sorted_arms(precision), sorted_arms(rate)
    figure, panels = grid(rows, columns, 1.6, notes=2, sharey=True)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            here = runs[(precision == row) & (rate == column)]
            draw_sizes(panels[i, j], metrics.merge(here[REPLICA]), here, size, color)
    limit(panels.flat, metrics)
    figure.supylabel(loss_label(runs), fontsize=8)
    results.legend(figure)
    return figure


def draw_sizes(axes: plt.Axes, metrics: pd.DataFrame, runs: pd.DataFrame, size: pd.Series, color: dict) -> None:
    by_size = dict(list(runs.groupby(size[runs.index])))
    for name, own in ((name, by_size[name]) for name in color if name in by_size):
        losses = losses_by_replica(metrics.merge(own[REPLICA]))
        band(axes, losses, color[name], shaded=False, linewidth=0.9, label=name)
        lost_lines(axes, losses, own, color[name], of="max")
    note(axes, said_of(runs).replace(", ", "\n"))


def pairs(runs: pd.DataFrame) -> str:
    """Return Markdown: for each two precisions, the pairs of equal size, rate and seeds in which only one diverged.

    Replicas of one size are not independent runs, so the last lines count sizes.
    """
    runs = runs.assign(rate=rates(runs), precision=named(runs, ["precision"]))
    rows = []
    for one, other in combinations(sorted_arms(runs["precision"]), 2):
        less = by_pair(runs, "precision", one, other, KEY)
        parts = {rate: less[rate] for rate in sorted_arms(runs["rate"])}
        parts["all rates, by size"] = less.groupby([DEPTH, WIDTH]).sum()
        rows += [signs(what, part, one, other) for what, part in parts.items() if part.any()]
    return results.markdown(COLUMNS, rows, left=["rate"]) + "\n\nPairs: replicas of one size, rate and seeds.\n"


def signs(what: str, less: pd.Series, one: str, other: str) -> tuple[object, ...]:
    """Return a row of the table. `less` are the differences one - other, not all of them 0."""
    above, below = alone(less)
    p = stats.binomtest(above, above + below).pvalue
    return what, len(less), f"{one}: {above}", f"{other}: {below}", f"{p:.2g}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("instability_fig06_learning_rate_grid", __doc__)
    chosen = options.parse_args(arguments)
    runs, metrics = load_chosen(options, chosen, "runs", "metrics")
    runs = ended_replicas(runs)
    arms = named(runs, ["precision"]) + ", " + rates(runs)
    save(draw(runs, metrics), chosen, f"{of_arms(runs, arms, __doc__)}\n{pairs(runs)}\n{table(runs, arms)}")


if __name__ == "__main__":
    main()
