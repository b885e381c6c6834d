"""Losses of several arms over training, and their differences from the first arm or from --baseline.

Lines: means over seeds; training losses are smoothed by an exponential mean over 1 % of the steps. Bands: from the
lowest to the highest seed; differences are taken between runs of the same seed. Cross: end of a diverged run.

python -m analysis.loss_comparison --runs runs/convergence --only model=llama_8b
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.style import ONE_COLUMN, arms_of, caption, colors, cross, figure_parser, load_chosen, plt, save
from analysis.units import SEEDS
from mxstudy.results import smoothed

DASHES = ("-", "--", ":", "-.")
# Value of --of -> kind of rows, column of the loss in nats, title of the axis, conversion of the loss to what is drawn.
QUANTITIES: dict[str, tuple[str, str, str, Callable[[pd.DataFrame], pd.DataFrame]]] = {
    "training_loss": ("metrics", "loss", "training loss, nats a token", lambda loss: loss),
    "validation_perplexity": ("validation", "validation_loss", "validation perplexity", np.exp),
}


def by_arm(rows: pd.DataFrame, runs: pd.DataFrame, column: str, smooth: bool) -> dict[str, pd.DataFrame]:
    """Return each arm's losses by step (rows) and seeds (columns). Raises ValueError for two runs of the same seeds."""
    names, seeds = arms_of(runs["label"]), [seed for seed in SEEDS if seed in runs]
    curves = dict(list(rows.groupby("fingerprint")))
    arms: dict[str, dict[tuple[int, ...], pd.Series]] = {}
    for run in runs[runs["fingerprint"].isin(curves)].to_dict("records"):
        losses = curves[run["fingerprint"]].drop_duplicates("step", keep="last").set_index("step")[column]
        arm, own = names[run["label"]], tuple(run[seed] for seed in seeds)
        if own in arms.setdefault(arm, {}):
            raise ValueError(f"--runs: two runs of the arm {arm!r} have the same seeds; exclude one with --without")
        arms[arm][own] = smoothed(losses) if smooth else losses
    return {arm: pd.DataFrame(found) for arm, found in arms.items()}


def draw(rows: pd.DataFrame, runs: pd.DataFrame, of: str, baseline: str | None = None) -> Figure:
    """Draw the figure. Raises ValueError if no arm has the word `baseline`, or two runs of an arm have equal seeds."""
    _, column, title, seen = QUANTITIES[of]
    arms = by_arm(rows, runs, column, smooth=of == "training_loss")
    first = next((arm for arm in arms if baseline is None or baseline in arm.split()), None)
    if first is None:
        raise ValueError(f"--baseline: no arm has the word {baseline}; there are {'; '.join(arms)}")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(ONE_COLUMN, 1.3 * ONE_COLUMN), sharex=True)
    for (arm, losses), stroke in zip(arms.items(), strokes(arms), strict=True):
        band(top, seen(losses), label=arm, **stroke)
        if arm != first:
            shared = losses.columns.intersection(arms[first].columns)
            band(bottom, (losses[shared] - arms[first][shared]).dropna(how="all"), **stroke)
    lost = runs.loc[runs["state"] == "diverged", "fingerprint"]
    for _, run in rows[rows["fingerprint"].isin(lost)].groupby("fingerprint"):
        cross(top, run["step"], seen(run[column]), color="black", markersize=5)
    bottom.axhline(0, color="black", linewidth=0.6)
    bottom.set_title(f"less that of {first}", fontsize=7)
    top.set(ylabel=title)
    bottom.set(xlabel="step", ylabel="difference of losses, nats")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", fontsize=7)
    return figure


def strokes(arms: Iterable[str]) -> list[dict[str, Any]]:
    """Return colour and dashes of each arm; arms of one colour differ in their dashes."""
    color, seen = colors(arms), Counter[str]()
    found = []
    for arm in arms:
        found.append({"color": color[arm], "linestyle": DASHES[seen[color[arm]] % len(DASHES)]})
        seen[color[arm]] += 1
    return found


def band(axes: Axes, losses: pd.DataFrame, color: str, **style: Any) -> None:
    """Draw the mean of the columns, and a band from the lowest to the highest."""
    low, high = losses.min(axis=1), losses.max(axis=1)
    axes.fill_between(losses.index, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(losses.index, losses.mean(axis=1), color=color, **style)


def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("loss_comparison", __doc__)
    options.add_argument("--of", choices=QUANTITIES, default="training_loss")
    options.add_argument("--baseline", metavar="WORD", help="word of the baseline arm's name, such as norm=rmsnorm")
    chosen = options.parse_args(arguments)
    rows, runs = load_chosen(options, chosen, QUANTITIES[chosen.of][0], "runs")
    try:
        figure = draw(rows, runs, chosen.of, chosen.baseline)
    except ValueError as error:
        options.error(str(error))
    save(figure, chosen.name, caption(rows, __doc__))


if __name__ == "__main__":
    main()
