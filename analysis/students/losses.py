"""Losses of students over training, one panel per arm and one colour per precision.

Lines: medians over replicas. Bands: their middle half. Thin lines: the replicas that diverged, with a cross where they
stop being finite. Their number is above each panel.

python -m analysis.students.losses --runs runs/loss --columns loss
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.students.arms import ended_replicas, named, of_arms, sorted_arms, table
from analysis.students.curves import UNITS, grid, limit, loss_label, loss_lines
from analysis.style import colors, figure_parser, load_chosen, save
from mxstudy.results import legend


def draw(
    runs: pd.DataFrame, metrics: pd.DataFrame, columns: Sequence[str], rows: Sequence[str], lines: Sequence[str]
) -> Figure:
    """Draw the figure. `runs` are from `students.arms.ended_replicas`.

    Raises ValueError for a key that the runs do not have.
    """
    column, row, line = (named(runs, keys) for keys in (columns, rows, lines))
    units = runs["config.loss"].map(UNITS)
    one_unit = units.nunique() == 1
    rows_of, columns_of = sorted_arms(row), sorted_arms(column)
    color_of = colors(sorted_arms(line))
    height = 2.2 if len(rows_of) < 3 else 1.5
    figure, panels = grid(rows_of, columns_of, height, notes=len(color_of), sharey=one_unit)
    places = [
        (panels[i, j], (row == r) & (column == c)) for i, r in enumerate(rows_of) for j, c in enumerate(columns_of)
    ]
    for axes, chosen in places:
        arms = {name: own for name in color_of if len(own := runs[chosen & (line == name)])}
        loss_lines(axes, metrics, arms, color_of)
        if not one_unit:
            limit([axes], metrics.merge(runs.loc[chosen, ["fingerprint", "replica"]]))
            axes.set_ylabel(units[chosen].iloc[0] if chosen.any() else "")
    if one_unit:
        limit(panels.flat, metrics)
        figure.supylabel(loss_label(runs), fontsize=8)
    legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("student_losses", __doc__)
    for option, default in {"--columns": [], "--rows": [], "--lines": ["precision"]}.items():
        what = "groups or fields, such as norm or model.activation"
        options.add_argument(option, nargs="+", default=default, metavar="KEY", help=what)
    chosen = options.parse_args(arguments)
    runs, metrics = load_chosen(options, chosen, "runs", "metrics")
    runs = ended_replicas(runs)
    with options.usage_errors():
        arms = named(runs, [*chosen.rows, *chosen.columns, *chosen.lines])
        figure = draw(runs, metrics, chosen.columns, chosen.rows, chosen.lines)
    save(figure, chosen, f"{of_arms(runs, arms, __doc__)}\n{table(runs, arms)}")


if __name__ == "__main__":
    main()
