"""Spike scores by arm, one point per run (MXNorm paper, figure A.3; the score is its Eq. 22).

An arm of five or more runs has a box: the quartiles, with whiskers to the farthest run within 1.5 times their distance.

python -m analysis.mxnorm.figa3_spike_scores --runs runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, load_ended, make_figure, plt

BOX_FROM = 5  # runs; the quartiles of fewer lie between two points


def draw(runs: pd.DataFrame) -> Figure:
    arms = list(runs.groupby("arm", sort=False))
    figure, axes = plt.subplots(figsize=(ONE_COLUMN, 0.6 + 0.4 * len(arms)))
    for place, (_, own) in enumerate(arms):
        scores, color = own["spike_score"], own["color"].iloc[0]
        if len(scores) >= BOX_FROM:
            line: dict[str, Any] = {"medianprops": {"color": color}, "orientation": "horizontal"}
            axes.boxplot(scores, positions=[place], widths=0.5, showfliers=False, **line)
        axes.plot(scores, [place] * len(scores), "o", color=color, markersize=4, alpha=0.8)
    labels = [f"{arm}\n{len(own)} run{'s' * (len(own) > 1)}" for arm, own in arms]
    axes.set_yticks(range(len(arms)), labels)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set(xlabel="spike score", xlim=(0, 1.1 * max(1.0, runs["spike_score"].max())))
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_figa3_spike_scores", __doc__, arguments, draw, "runs", query=load_ended)


if __name__ == "__main__":
    main()
