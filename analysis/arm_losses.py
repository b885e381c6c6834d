"""Loss of each arm of a sweep of recipes minus that of bf16, with a point for each pair of seeds.

Lines: means with 95 % intervals; grey: the margin within which arms are equal. Right, if the probe was on: the ratio of
the gradient's error to the gradient in FP32 at the same weights, at the last measurement. A run that died is in no
mean; it is counted beside its arm's name.

python -m analysis.arm_losses --runs runs/fp4_where --of fp4_where
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.fp4.arms import BF16
from analysis.fp4.questions import QUESTIONS
from analysis.recipe.arms_23m import RECIPE, RECIPE_AGAIN
from analysis.stated import Question
from analysis.statistics import CONFIDENCE, Effect
from analysis.style import ONE_COLUMN, TWO_COLUMNS, caption, figure_parser, load_ended, load_or_none, plt, save
from analysis.units import STEPS, chosen, died, need_columns, paired
from mxstudy.results import legend

BY_SWEEP = {one.sweep: one for one in (*QUESTIONS, RECIPE, RECIPE_AGAIN)}
ERROR = "model/ratio"


def losses(of: Question, runs: pd.DataFrame) -> dict[str, Effect]:
    """Return each arm's loss minus that of bf16 runs with the same number of steps, without arms that have no pair."""
    found = {}
    for name, arm in of.arms.items():
        baseline = {**BF16, **({STEPS: arm[STEPS]} if STEPS in arm else {})}
        if arm == baseline:
            continue
        effect = paired(
            runs, "validation_loss", chosen(runs, arm), chosen(runs, baseline), ["config.precision", "config.norm"]
        )
        if effect.count:
            found[name] = effect
    return found


def errors(of: Question, runs: pd.DataFrame, bias: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the last error of the gradient of each arm's runs."""
    last = bias.sort_values("step").groupby("fingerprint")[ERROR].last()
    return {name: last.reindex(runs.loc[chosen(runs, arm), "fingerprint"]).dropna() for name, arm in of.arms.items()}


def draw(of: Question, runs: pd.DataFrame, bias: pd.DataFrame | None) -> Figure:
    """Draw the figure, or its left panel alone without `bias`. Raises ValueError if no arm has a pair with bf16."""
    need_columns(runs, ["validation_loss"])
    found = losses(of, runs)
    if not found:
        raise ValueError(f"no arm of {of.sweep} has a pair of seeds with bf16 in these runs")
    panels, width = (1, ONE_COLUMN) if bias is None else (2, TWO_COLUMNS)
    size = (width, 1.0 + 0.22 * len(found))
    figure, ((left, *right),) = plt.subplots(1, panels, figsize=size, sharey=True, squeeze=False)
    for y, effect in enumerate(found.values()):
        left.plot(effect.units, np.full(effect.count, y), ".", color="0.6", markersize=3, label="a pair of seeds")
        left.plot(effect.interval(CONFIDENCE), [y, y], color="#0072B2", label="95 % interval")
        left.plot(effect.value, y, "|", color="#0072B2", label="mean")
    dead = {name: int(died(runs[chosen(runs, of.arms[name])], "validation_loss").sum()) for name in found}
    labels = [f"{name} ({dead[name]} died)" if dead[name] else name for name in found]
    left.set_yticks(range(len(found)), labels)
    left.set_ylim(len(found) - 0.4, -0.6)
    left.axvspan(-of.margin, of.margin, color="0.9", zorder=0, label="alike")
    left.set_xlabel("loss minus that of bf16, nats", loc="right")  # beside long names it is longer than the axes
    left.locator_params(axis="x", nbins=5 if right else 3)
    for axes in right:
        wrong = errors(of, runs, bias)
        for y, name in enumerate(found):
            axes.plot(wrong[name], np.full(len(wrong[name]), y), ".", color="#D55E00", markersize=3, label="a run")
        axes.set_xlabel("gradient's error over the gradient")
    legend(figure, title=of.asks)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("arm_losses", __doc__)
    options.add_argument("--of", choices=BY_SWEEP, required=True)
    given = options.parse_args(arguments)
    (runs,) = load_ended(options, given, "runs")
    with options.usage_errors():
        figure = draw(BY_SWEEP[given.of], runs, load_or_none(given.runs, "gradient_bias"))
    save(figure, given, caption(runs, __doc__, given.runs))


if __name__ == "__main__":
    main()
