"""Draw curves of replicas in one panel: median and band over them, and a thin line for each that diverged.

Most curves have thousands of steps; neighbouring steps are drawn as one point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.students.arms import REPLICA
from analysis.style import ONE_COLUMN, TWO_COLUMNS, plt

POINTS = 300
DOTTED = 10  # curves with fewer points have a marker at each
QUANTILES = (0.25, 0.5, 0.75)
BASELINES = ("fp32", "bf16")
THIN: dict[str, Any] = {"linewidth": 0.4, "alpha": 0.55}
BAND, LOST, END = "middle half of the replicas", "diverged replica", "no longer finite"
UNITS = {"mse": "mean squared error", "kl": "KL divergence, nats"}
LINE = 7.5  # points from one line of notes to the next
HEADROOM = 100.0  # the axis ends at this multiple of the highest loss at the start


def by_replica(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the column by step (rows) and replica (columns), NaN if not finite."""
    wide = rows.pivot(index="step", columns=REPLICA, values=column).astype(float)
    return wide.where(np.isfinite(wide))


def losses_by_replica(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by step (rows) and replica (columns), infinite where not finite and to the end after that."""
    is_alive = np.isfinite(metrics[["loss", "grad_norm"]]).all(axis=1)
    losses = metrics.assign(loss=metrics["loss"].where(is_alive, np.inf))
    wide = losses.pivot(index="step", columns=REPLICA, values="loss").astype(float)
    return wide.mask(wide.bfill().isna() & np.isinf(wide.ffill()), np.inf)


def bins(values: pd.DataFrame) -> np.ndarray:
    """Return, for each row, the first step of its point.

    Points have an odd number of rows, so medians are exact.
    """
    steps = values.index.to_numpy()
    size = -(-len(steps) // POINTS) | 1
    return np.asarray(steps[np.arange(len(steps)) // size * size])


def band(axes: Axes, values: pd.DataFrame, color: Any, shaded: bool = True, **style: Any) -> None:
    """Draw median and quartiles over replicas (columns), each first reduced to medians over neighbouring steps."""
    middles = values.groupby(bins(values)).quantile(0.5, interpolation="lower")
    low, middle, high = np.nanquantile(middles.to_numpy(), QUANTILES, axis=1, method="inverted_cdf")
    if shaded and values.shape[1] > 1:
        axes.fill_between(middles.index, low, finite(high, 1e30), color=color, alpha=0.18, linewidth=0, label=BAND)
    dots: dict[str, Any] = {"marker": ".", "markersize": 4} if len(middles) < DOTTED else {}
    axes.plot(middles.index, finite(middle), color=color, **dots, **style)


def lost_lines(axes: Axes, values: pd.DataFrame, runs: pd.DataFrame, color: Any, of: str = "median") -> None:
    """Draw each diverged replica's median or max of neighbouring values, with a cross where they become infinite."""
    lost = [tuple(replica) for replica in runs.loc[runs["diverged"] > 0, REPLICA].to_numpy()]
    points = values[lost].groupby(bins(values)).agg(of)
    for replica in lost:
        axes.plot(points.index, finite(points[replica].to_numpy()), color=color, zorder=1.5, label=LOST, **THIN)
        end = np.argmax(np.isinf(values[replica]))
        if end > 0:
            last = values[replica].iloc[end - 1]
            axes.plot(
                values.index[end], last, "x", color=color, label=END, markersize=3.5, markeredgewidth=0.8, zorder=3
            )


def finite(values: np.ndarray, instead: float = np.nan) -> np.ndarray:
    return np.where(np.isfinite(values), values, instead)


def loss_lines(
    axes: Axes,
    metrics: pd.DataFrame,
    arms: dict[str, pd.DataFrame],
    colors: dict[str, Any],
    counted: dict[str, pd.DataFrame] | None = None,
) -> None:
    """Draw the losses of each arm's replicas (from `students.arms.ended_replicas`), and above them how many diverged.

    The baselines FP32 and bf16 are dashed and on top. `counted` are all replicas of each arm, if only some are drawn.
    """
    for place, (name, runs) in enumerate(arms.items()):
        losses = losses_by_replica(metrics.merge(runs[REPLICA]))
        is_known = not {*name.split()}.isdisjoint(BASELINES)
        style: dict[str, Any] = {"linestyle": "--" if is_known else "-", "zorder": 2.5 if is_known else 2}
        band(axes, losses, colors[name], label=name, **style)
        lost_lines(axes, losses, runs, colors[name], of="max")
        note(axes, said_of((counted or arms)[name]), len(arms) - 1 - place, colors[name])


def said_of(runs: pd.DataFrame) -> str:
    """Return how many of all runs diverged, and how many are open, as the pages count them."""
    still_open = runs["open"].sum()
    return f"{(runs['diverged'] > 0).sum()} of {len(runs)} diverged" + (f", {still_open} open" if still_open else "")


def note(axes: Axes, said: str, place: int = 0, color: Any = "black") -> None:
    """Write text above the panel, at the right, above `place` lines of text."""
    where: dict[str, Any] = {
        "xycoords": "axes fraction",
        "xytext": (0, 1 + LINE * place),
        "textcoords": "offset points",
    }
    axes.annotate(said, (1, 1), ha="right", va="bottom", fontsize=6, color=color, **where)


def loss_label(runs: pd.DataFrame, comma: str = ", ") -> str:
    """Return the name of an axis of these runs' losses."""
    return comma.join(["training loss", *(UNITS[loss] for loss in runs["config.loss"].unique())])


def limit(panels: Iterable[Axes], losses: pd.DataFrame) -> None:
    """Give all panels the same logarithmic axis, high enough to see that a loss exceeds its start."""
    values = losses.loc[np.isfinite(losses["loss"]) & (losses["loss"] > 0), ["step", "loss"]]
    if not len(values):
        return
    top = min(values["loss"].max(), HEADROOM * values.loc[values["step"] == values["step"].min(), "loss"].max())
    for axes in panels:
        axes.set(yscale="log", ylim=(values["loss"].min() / 1.5, 1.5 * top))


def grid(
    rows: Sequence[str], columns: Sequence[str], height: float = 1.5, notes: int = 0, **shared: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure and its panels, with the columns' names above and the rows' names at the right.

    `notes` is the number of lines of text above each panel.
    """
    size = (TWO_COLUMNS if len(columns) > 1 else ONE_COLUMN, 0.75 + (height + 0.1 * notes) * len(rows))
    figure, panels = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False, sharex=True, **shared)
    for axes, name in zip(panels[0], columns, strict=True):
        axes.set_title(name.replace(", ", "\n"), fontsize=8, pad=4 + LINE * notes)
    for axes, name in zip(panels[:, -1], rows, strict=True):
        axes.annotate(
            name.replace(", ", "\n"), (1.03, 0.5), xycoords="axes fraction", rotation=-90, va="center", fontsize=7
        )
    figure.supxlabel("step", fontsize=8)
    return figure, panels
