"""Show where the error of each arm of a contradiction between FP4 recipes arises, at the runs' last measurement.

Left: the signal to quantisation noise of each operand that the arm quantises. Right: 1 minus the cosine of the gradient
with that in FP32 at the same weights, of each linear's weight. Further right, if a run has measured it: how far
one operand alone quantised moves the gradient of these weights, as a fraction of its length; where it moves none, there
is no value. Points: means over runs and linears, or layers; lines: from the least to the most of these.

python -m analysis.fp4.errors --runs runs/fp4_where --of fp4_where
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.arm_losses import BY_SWEEP
from analysis.command import command
from analysis.stated import Question
from analysis.style import TWO_COLUMNS, caption, figure_parser, load_chosen, plt, save
from analysis.units import chosen

OPERANDS = ("forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x")
LINEARS = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7")


def at_the_end(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return the mean over runs of each column that the pattern names, at each run's last measurement."""
    last = rows.sort_values("step").groupby("fingerprint").last()
    return last.filter(regex=column).mean().dropna()


def noise(saturation: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the SQNR in decibels of each operand, by linear."""
    return {name: at_the_end(saturation, rf"/{name}/sqnr_db$") for name in OPERANDS}


def turned(bias: pd.DataFrame) -> dict[str, pd.Series]:
    """Return 1 minus the cosine of the gradient of each linear's weight, by layer."""
    return {name: 1 - at_the_end(bias, rf"^layers\.\d+\.{name}\.weight/cosine$") for name in LINEARS}


def moved(bias: pd.DataFrame) -> dict[str, pd.Series]:
    """Return how far each operand, alone quantised, moves the gradients of linears' weights, of those that it moves."""
    weights = "|".join(LINEARS)
    ratios = {name: at_the_end(bias, rf"^layers\.\d+\.({weights})\.weight/{name}/ratio$") for name in OPERANDS}
    return {name: values[values > 0] for name, values in ratios.items()}


# Kind of rows (saturation: 0, gradient_bias: 1), quantity, label and scale of a panel; the last is not always drawn.
PANELS = (
    (0, noise, "SQNR of operands, dB", "linear"),
    (1, turned, "1 - cosine of the gradient with FP32's", "log"),
    (1, moved, "moved by one operand, fraction", "log"),
)


def draw(of: Question, runs: pd.DataFrame, saturation: pd.DataFrame, bias: pd.DataFrame) -> Figure:
    """Draw the figure. Raises ValueError if no run of any arm has a measurement."""
    measured = {
        name: [
            part[part["fingerprint"].isin(runs.loc[chosen(runs, arm), "fingerprint"])] for part in (saturation, bias)
        ]
        for name, arm in of.arms.items()
    }
    measured = {name: parts for name, parts in measured.items() if any(map(len, parts))}
    if not measured:
        raise ValueError(f"no run of an arm of {of.sweep} has measured its errors; give them probe=errors")
    by_operand = any(len(values) for values in moved(bias).values())
    panels = PANELS if by_operand else PANELS[:2]
    size = (TWO_COLUMNS, 0.9 + 0.36 * len(measured))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True)
    for one, (kind, quantity, label, scale) in zip(axes, panels, strict=True):
        draw_spreads(one, [parts[kind] for parts in measured.values()], quantity)
        one.set(xlabel=label, xscale=scale)
    axes[0].set_yticks(range(len(measured)), measured)
    axes[0].invert_yaxis()
    figure.suptitle(of.asks)
    return figure


def draw_spreads(axes: Axes, arms: Sequence[pd.DataFrame], of: Callable[[pd.DataFrame], dict[str, pd.Series]]) -> None:
    """Draw a row for each arm, with a line for each of its quantities."""
    for y, rows in enumerate(arms):
        found = of(rows)
        for i, (color, values) in enumerate(zip(COLORS, found.values(), strict=False)):
            if len(values):
                height = y + 0.7 * ((i + 0.5) / len(found) - 0.5)
                axes.plot([values.min(), values.max()], [height, height], color=color, linewidth=0.8)
                axes.plot(values.mean(), height, ".", color=color, markersize=4)
    entries = [plt.Line2D([], [], color=color, label=name) for color, name in zip(COLORS, of(arms[0]), strict=False)]
    axes.legend(handles=entries, fontsize=6, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("fp4_errors", __doc__)
    options.add_argument("--of", choices=BY_SWEEP, required=True)
    given = options.parse_args(arguments)
    runs, *measured = load_chosen(options, given, "runs", "saturation", "gradient_bias")
    with options.usage_errors():
        figure = draw(BY_SWEEP[given.of], runs, *measured)
    save(figure, given, caption(runs, __doc__, given.runs))


if __name__ == "__main__":
    main()
