"""Spike scores by arm, one point per run (MXNorm paper, figure A.3; the score is its Eq. 22).

python -m analysis.mxnorm.figa3_spike_scores --runs runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, load_ended, make_figure, plt


def draw(runs: pd.DataFrame) -> Figure:
    arms = {str(arm).replace(" ", "\n"): own["spike_score"] for arm, own in runs.groupby("arm", sort=False)}
    color = {arm.replace(" ", "\n"): color for arm, color in zip(runs["arm"], runs["color"], strict=True)}
    figure, axes = plt.subplots(figsize=(1.4 * ONE_COLUMN, ONE_COLUMN))
    for place, (arm, scores) in enumerate(arms.items()):
        axes.boxplot(scores, positions=[place], widths=0.5, showfliers=False, medianprops={"color": color[arm]})
        axes.plot([place] * len(scores), scores, "o", color=color[arm], markersize=4, alpha=0.8)
    labels = [f"{arm}\n{len(scores)} run{'s' * (len(scores) > 1)}" for arm, scores in arms.items()]
    axes.set_xticks(range(len(arms)), labels)
    axes.set(ylabel="spike score", ylim=(0, 1.1 * max(1.0, runs["spike_score"].max())))
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_figa3_spike_scores", __doc__, arguments, draw, "runs", query=load_ended)


if __name__ == "__main__":
    main()
