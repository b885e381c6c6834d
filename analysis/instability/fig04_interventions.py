"""Effect of interventions shortly before a run diverges: do they prevent it? (instability paper, figure 4).

Left: one panel per point at which runs are forked, given in steps before the divergence or as a fraction of the way to
it; lines: medians over the forks. Right: the fraction that diverges, with Wilson's 95 % interval. Two controls are
black: 'none' (dashed) repeats the run bit by bit, 'perturbed' (dotted) flips one bit of one weight and changes nothing
else. An intervention helps if fewer forks diverge with it than with 'perturbed', because any change redraws what
follows.

python -m analysis.instability.fig04_interventions --runs runs/interventions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.command import command, without_command
from analysis.students.arms import difference, quartiles, shown, shown_interval
from analysis.students.curves import band, limit, losses_by_replica
from analysis.style import TWO_COLUMNS, colors, figure_parser, load_chosen, plt, save
from analysis.units import DATA_SEED, SEED
from mxstudy import results

REDRAWN = "perturbed"
CONTROLS = {"none": "dashed", REDRAWN: "dotted"}  # the style of a control's line
BLACK = "#000000"
WORDS = ("intervention", "at")
NUMBERS = ("forks", "open", "diverged", "95 %", "steps from the fork", "minus the redraw's, data seeds", "final loss")
MARKERS = "os^v"
LEGEND = """\
Diverged: the loss stays over 10 times its best, the parent's before the fork included, for more than 500 steps; counted
of all forks, with Wilson's 95 % interval. Open: the loss is up there at the end, but for fewer steps. Steps from the
fork: to each divergence. Final loss: median and quartiles."""


def with_outcomes(forks: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the forks with columns `intervention`, `diverged` (1 or 0) and `open` (bool)."""
    named = runs.set_index("fingerprint")["choice.intervention"]
    lost = forks["diverged_at"].notna()
    return forks.assign(
        intervention=forks["fingerprint"].map(named),
        diverged=lost.astype(float),
        open=forks["rising_at"].notna() & ~lost,
        **{SEED: forks["seed"], DATA_SEED: forks["data_seed"]},
    )


def interventions(forks: pd.DataFrame) -> list[str]:
    """Return the names of the interventions, the controls first."""
    return sorted(forks["intervention"].unique(), key=lambda name: (name not in CONTROLS, name))


def of_point(point: str) -> tuple[str, float]:
    """Return what points are sorted by: the kind, then the number."""
    kind, _, number = point.partition(" ")
    return ("", float(kind)) if not number else (kind, float(number))


def title(point: str) -> str:
    """Return the title of a point: 'before 10', '0.88' or 'step 300'."""
    kind, _, number = point.partition(" ")
    titles = {"before": f"{number} steps before divergence", "step": point}
    return titles.get(kind, f"at {kind} of the way to divergence")


def colors_of(forks: pd.DataFrame) -> dict[str, str]:
    names = interventions(forks)
    own = dict.fromkeys(CONTROLS, BLACK) | colors(name for name in names if name not in CONTROLS)
    return {name: own[name] for name in names}


def draw(forks: pd.DataFrame, metrics: pd.DataFrame) -> Figure:
    points, colors = sorted(forks["point"].unique(), key=of_point), colors_of(forks)
    figure, panels = plt.subplots(1, len(points) + 1, figsize=(TWO_COLUMNS, max(2.2, 0.9 + 0.2 * len(colors))))
    metrics = metrics.merge(forks, on=["fingerprint", "fork"], suffixes=("", "_of_fork"))
    metrics = metrics.assign(step=metrics["step"] - metrics["step_of_fork"], replica=metrics["fork"])
    for axes, point in zip(panels, points, strict=False):
        axes.set_title(title(point), fontsize=8)
        axes.set_xlabel("steps since the fork")
        for name, color in colors.items():
            own = metrics[(metrics["point"] == point) & (metrics["intervention"] == name)]
            if len(own):
                style = {"linestyle": CONTROLS[name], "zorder": 3} if name in CONTROLS else {}
                band(axes, losses_by_replica(own), color, shaded=False, **style)
    limit(panels[:-1], metrics)
    panels[0].set_ylabel("training loss, median")
    draw_fractions(panels[-1], forks, points, colors)
    return figure


def draw_fractions(axes: Axes, forks: pd.DataFrame, points: Sequence[str], colors: dict[str, str]) -> None:
    """Draw one row per intervention and one marker per point.

    The rows' coloured names are also the legend of the lines.
    """
    for place, (name, color) in enumerate(colors.items()):
        for number, point in enumerate(points):
            known = forks.loc[(forks["intervention"] == name) & (forks["point"] == point), "diverged"]
            if len(known):
                share = results.fraction(int(known.sum()), len(known))
                y = place + 0.3 * (number - (len(points) - 1) / 2)
                axes.hlines(y, share.low, share.high, color=color, linewidth=0.8)
                axes.plot(share.value, y, **marker(number, color))
    axes.set(xlim=(-0.03, 1.03), ylim=(len(colors) - 0.5, -0.5), xlabel="fraction that diverges")
    counts = forks.groupby(["intervention", "point"]).size().groupby(level=0).max()
    notes = {name: f"{counts[name]} forks" for name in colors if counts[name] < counts.max()} | CONTROLS
    axes.set_yticks(range(len(colors)), [f"{n} ({notes[n]})" if n in notes else n for n in colors], fontsize=7)
    for label, color in zip(axes.get_yticklabels(), colors.values(), strict=True):
        label.set_color(color)
    marked = [Line2D([], [], label=title(point), **marker(number, "0.3")) for number, point in enumerate(points)]
    axes.legend(handles=marked, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=6)


def marker(number: int, color: str) -> dict[str, Any]:
    """Return the marker of a point. The first point's is filled."""
    face = color if number == 0 else "white"
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "color": color,
        "markersize": 4,
        "markerfacecolor": face,
        "linestyle": "",
    }


def table(forks: pd.DataFrame) -> str:
    rows = []
    for point, at_point in forks.groupby("point"):
        control = at_point[at_point["intervention"] == REDRAWN]
        for name in interventions(at_point):
            own = at_point[at_point["intervention"] == name]
            less = shown(difference(own, control)) if len(control) and name not in CONTROLS else "-"
            low, middle, high = quartiles(own["loss"])
            cells = [
                name,
                point,
                len(own),
                own["open"].sum(),
                f"{own['diverged'].sum():.0f} of {len(own)}",
                shown_interval(own["diverged"]),
                ", ".join(f"{steps:.0f}" for steps in sorted((own["diverged_at"] - own["step"]).dropna())) or "-",
                less,
                f"{middle:.3g} ({low:.3g} .. {high:.3g})",
            ]
            rows.append(cells)
    return results.markdown(WORDS + NUMBERS, rows, left=WORDS) + f"\n\n{LEGEND}\n"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("instability_fig04_interventions", __doc__)
    chosen = options.parse_args(arguments)
    runs, forks, metrics = load_chosen(options, chosen, "runs", "forks", "fork_metrics")
    forks = with_outcomes(forks, runs)
    parents = ", ".join(fingerprint[:12] for fingerprint in forks["parent"].unique())
    with options.usage_errors():
        caption = f"{without_command(__doc__)}\n\nForks of {parents}.\n\n{table(forks)}"
    save(draw(forks, metrics), chosen, caption)


if __name__ == "__main__":
    main()
