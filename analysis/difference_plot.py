"""Draw how far each arm's validation loss is from that of the arm that it is compared with, paired by seed."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from analysis.style import ONE_COLUMN, plt
from analysis.units import ended
from mxstudy.results import Estimate, arm_rows

LOSS = "validation_loss"


def apart(runs: pd.DataFrame) -> dict[tuple[str, str, str], Estimate]:
    """Return the difference of each arm that has a pair, by its name, its colour and the other arm's name."""
    rows = arm_rows(ended(runs), LOSS)
    found = {(row.arm, row.color, row.partner or ""): row.difference for row in rows}
    return {key: one for key, one in found.items() if one is not None and one.count}


def suits(runs: pd.DataFrame) -> bool:
    return bool(apart(runs))


def draw(runs: pd.DataFrame) -> Figure:
    """Draw a mean with its 95 % interval for each arm. `runs` are from `results.with_arms`, and some are pairs."""
    found = apart(runs)
    figure, axes = plt.subplots(figsize=(ONE_COLUMN, 0.8 + 0.35 * len(found)))
    axes.axvline(0, color="black", linewidth=0.6)
    for place, ((_, color, _), one) in enumerate(found.items()):
        spread = None if math.isnan(one.half_width) else one.half_width
        axes.errorbar(one.value, place, xerr=spread, fmt="o", markersize=4, color=color)
    names = [f"{arm}\n{one.count} pair{'s' * (one.count > 1)}" for (arm, _, _), one in found.items()]
    axes.set_yticks(range(len(found)), names)
    axes.set_ylim(len(found) - 0.5, -0.5)
    others = {other for _, _, other in found}
    axes.set_xlabel(f"validation loss minus that of\n{others.pop() if len(others) == 1 else 'the baseline'}, nats")
    return figure
