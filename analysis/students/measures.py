"""Draw measurements on stacks during training above their losses: one row per quantity, one column per arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.students.arms import REPLICA, ended_replicas, named, of_arms, sorted_arms, table
from analysis.students.curves import band, by_replica, grid, limit, loss_label, loss_lines, lost_lines
from analysis.style import figure_parser, load_chosen, save
from mxstudy import results

LOSS, LOSS_COLOR = "training loss", "#000000"
LEVELS = (":", "-.")  # how constants are drawn
RECENT = 20  # number of earlier measurements with which the last before a divergence is compared
WORDS = ("arm", "measured")
TIMES = ("before the divergence", "the last time before it", "steps before", "above the 20 before that", "after it")
LEGEND = """\
Medians over replicas of each replica's median, with the minimum and the maximum. Before the divergence: all steps if
there is none. Above the 20 before that: replicas whose last value before their divergence is above all 20 values
measured before it; by chance, this is one of 21."""


@dataclass(frozen=True)
class Row:
    """A row of panels. `lines` is {name: (column of `frame`, colour)}. `levels` is {name: constant}, at most two.

    `thin` says whether each diverged replica has its own thin line.
    """

    title: str
    frame: pd.DataFrame
    lines: Mapping[str, tuple[str, Any]]
    levels: Mapping[str, float] = field(default_factory=dict)
    scale: str = "linear"
    thin: bool = True


def draw(
    runs: pd.DataFrame,
    metrics: pd.DataFrame,
    arms: pd.Series,
    rows: Sequence[Row],
    everyone: pd.DataFrame | None = None,
) -> Figure:
    """Draw medians over replicas with bands around them, and the losses at the bottom.

    `everyone` are all replicas, which are counted, if only some are drawn.
    """
    names, everyone = sorted_arms(arms[runs.index]), runs if everyone is None else everyone
    figure, panels = grid([""] * (len(rows) + 1), names, 1.35, sharey="row")
    for name, column in zip(names, panels.T, strict=True):
        own = runs[arms[runs.index] == name]
        for axes, row in zip(column, rows, strict=False):
            measured = row.frame.merge(own[REPLICA])
            for line, color in row.lines.values():
                if line in measured and measured[line].notna().any():
                    values = by_replica(measured.dropna(subset=line), line)
                    band(axes, values, color)
                    if row.thin:
                        lost_lines(axes, values, own, color)
            for level, style in zip(row.levels.values(), LEVELS, strict=False):
                axes.axhline(level, color="black", linestyle=style, linewidth=0.9)
            axes.set_yscale(row.scale)
        counted = {LOSS: everyone[arms[everyone.index] == name]}
        loss_lines(column[-1], metrics, {LOSS: own}, {LOSS: LOSS_COLOR}, counted)
    limit(panels[-1], metrics)
    for axes, row in zip(panels[:, 0], rows, strict=False):
        axes.set_ylabel(row.title, fontsize=7)
    for axes, row in zip(panels[:, -1], rows, strict=False):
        entries = [Line2D([], [], color=color, label=name) for name, (_, color) in row.lines.items()]
        levels = zip(row.levels, LEVELS, strict=False)
        entries += [Line2D([], [], color="black", ls=style, lw=0.9, label=name) for name, style in levels]
        axes.legend(handles=entries, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=6)
    panels[-1, 0].set_ylabel(loss_label(runs, ",\n"), fontsize=7)
    results.legend(figure)
    return figure


def medians(runs: pd.DataFrame, arms: pd.Series, rows: Sequence[Row]) -> str:
    """Return Markdown with one line per arm and quantity: values before and after each replica's divergence."""
    said = []
    for arm in sorted_arms(arms):
        own = runs[arms == arm]
        for row in rows:
            for name, (column, _) in row.lines.items():
                if column in row.frame:
                    said.append([arm, f"{row.title} of {name}".replace("\n", " "), *cells(own, row.frame, column)])
    return results.markdown(WORDS + TIMES, said, left=WORDS) + f"\n\n{LEGEND}\n"


def cells(runs: pd.DataFrame, measured: pd.DataFrame, column: str) -> list[str]:
    """Return what TIMES names of a measured column, for these runs."""
    found = measured.merge(runs[[*REPLICA, "outcome.diverged_at"]]).dropna(subset=column).sort_values("step")
    since = found["step"] - found["outcome.diverged_at"]
    before = {of: part[column].to_numpy(float) for of, part in found[~(since >= 0)].groupby(REPLICA)}
    after = {of: part[column].to_numpy(float) for of, part in found[since >= 0].groupby(REPLICA)}
    last = [before[of][-1 - RECENT :] for of in after if len(before.get(of, ())) > RECENT]
    steps = -since[since < 0].groupby([found[key] for key in REPLICA]).max()
    above = sum(values[-1] > values[:-1].max() for values in last)
    return [
        median_and_range([np.median(values) for values in before.values()]),
        median_and_range([values[-1] for values in last]),
        f"{steps.min():.0f} .. {steps.max():.0f}" if last else "-",
        f"{above} of {len(last)}" if last else "-",
        median_and_range([np.median(values) for values in after.values()]),
    ]


def median_and_range(values: Sequence[float]) -> str:
    return f"{np.median(values):.3g} ({min(values):.3g} .. {max(values):.3g})" if len(values) else "-"


def around_divergence(runs: pd.DataFrame, rows: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Return the rows at most `steps` steps from each diverged replica's divergence, which becomes step 0.

    Steps are shifted by multiples of the probe's interval, so that replicas share them: the last row at or before the
    divergence becomes step 0.
    """
    every = rows["step"].drop_duplicates().sort_values().diff().min()
    found = rows.merge(runs.loc[runs["diverged"] > 0, [*REPLICA, "outcome.diverged_at"]])
    since = -((found["outcome.diverged_at"] - found["step"]) // every * every)
    return found.assign(step=since)[since.abs() <= steps]


def make_measures(
    name: str, shows: str | None, arguments: Sequence[str] | None, rows_of: Any, keys: Sequence[str], *probes: str
) -> None:
    """Run the whole command of a script. `rows_of` makes the figure's rows from one frame per probe of `probes`."""
    options = figure_parser(name, shows)
    options.add_argument("--columns", nargs="+", default=[*keys], metavar="KEY", help="groups or fields of each arm")
    around = "draw only diverged replicas, this many steps before and after the divergence, which becomes step 0"
    options.add_argument("--around-divergence", type=int, metavar="STEPS", help=around)
    chosen = options.parse_args(arguments)
    runs, metrics, *frames = load_chosen(options, chosen, "runs", "metrics", *probes)
    runs = ended_replicas(runs)
    with options.usage_errors():
        arms = named(runs, chosen.columns)
    said = medians(runs, arms, rows_of(*frames))
    everyone = runs
    if chosen.around_divergence:
        metrics, *frames = (around_divergence(runs, rows, chosen.around_divergence) for rows in (metrics, *frames))
        runs = runs[runs["diverged"] > 0]
        if runs.empty:
            options.error("--around-divergence: no replica diverged")
    figure = draw(runs, metrics, arms, rows_of(*frames), everyone)
    arms = arms[runs.index]
    if chosen.around_divergence:
        figure.supxlabel("steps from the divergence", fontsize=8)
    save(figure, chosen, f"{of_arms(runs, arms, shows)}\n{said}\n{table(runs, arms)}")
