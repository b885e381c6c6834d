"""What each arm of a contradiction between FP4 recipes loses against bf16, a point a pair of seeds.

Lines: means with 95 % intervals; grey: the margin within which arms are alike. Right: the ratio of the gradient's error
to the gradient in FP32 at the same weights, at the last measurement, where the probe was on. A run that died is in no
mean, and is counted beside its arm's name.

python -m analysis.fp4.losses --runs runs/fp4_where --of fp4_where
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.fp4.contradictions import BF16, CONTRADICTIONS, MARGIN, STEPS, Contradiction
from analysis.statistics import CONFIDENCE, Effect
from analysis.style import TWO_COLUMNS, caption, figure_parser, load_chosen, plt, save
from analysis.units import chosen, ended, paired
from mxstudy.results import legend

BY_SWEEP = {one.sweep: one for one in CONTRADICTIONS}
ERROR = "model/ratio"


def losses(of: Contradiction, runs: pd.DataFrame) -> dict[str, Effect]:
    """Return what each arm loses against the bf16 runs of as many steps, arms without a pair left out."""
    found = {}
    for name, arm in of.arms.items():
        baseline = {**BF16, **({STEPS: arm[STEPS]} if STEPS in arm else {})}
        if arm == baseline:
            continue
        effect = paired(runs, "validation_loss", chosen(runs, arm), chosen(runs, baseline), ["config.precision"])
        if effect.count:
            found[name] = effect
    return found


def errors(of: Contradiction, runs: pd.DataFrame, bias: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the last error of the gradient of each arm's runs."""
    last = bias.sort_values("step").groupby("fingerprint")[ERROR].last()
    return {name: last.reindex(runs.loc[chosen(runs, arm), "fingerprint"]).dropna() for name, arm in of.arms.items()}


def draw(of: Contradiction, runs: pd.DataFrame, bias: pd.DataFrame) -> Figure:
    """Draw the figure. Raises ValueError if no arm has a pair with bf16."""
    found, wrong = losses(of, runs), errors(of, runs, bias)
    if not found:
        raise ValueError(f"no arm of {of.sweep} has a pair of seeds with bf16 in these runs")
    figure, (left, right) = plt.subplots(1, 2, figsize=(TWO_COLUMNS, 1.0 + 0.22 * len(found)), sharey=True)
    for y, (name, effect) in enumerate(found.items()):
        left.plot(effect.units, np.full(effect.count, y), ".", color="0.6", markersize=3, label="a pair of seeds")
        left.plot(effect.interval(CONFIDENCE), [y, y], color="#0072B2", label="95 % interval")
        left.plot(effect.value, y, "|", color="#0072B2", label="mean")
        right.plot(wrong[name], np.full(len(wrong[name]), y), ".", color="#D55E00", markersize=3, label="a run")
    labels = [name if not one.died[0] else f"{name} ({one.died[0]} died)" for name, one in found.items()]
    left.set_yticks(range(len(found)), labels)
    left.invert_yaxis()
    left.axvspan(-MARGIN[0], MARGIN[0], color="0.9", zorder=0, label="alike")
    left.set_xlabel("loss less bf16's, nats")
    right.set_xlabel("gradient's error over the gradient")
    left.locator_params(axis="x", nbins=5)
    legend(figure, title=of.asks)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("fp4_losses", __doc__)
    options.add_argument("--of", choices=BY_SWEEP, required=True)
    given = options.parse_args(arguments)
    runs, bias = load_chosen(options, given, "runs", "gradient_bias")
    try:
        figure = draw(BY_SWEEP[given.of], ended(runs), bias)
    except ValueError as error:
        options.error(str(error))
    save(figure, given, caption(runs, __doc__, given.runs))


if __name__ == "__main__":
    main()
