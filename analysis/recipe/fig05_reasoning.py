"""Scores over training: MMLU (left) and the average of nine tasks (right), by tokens (MXFP8 recipe, figure 5, bottom).

Lines: means over seeds; bands: from the lowest to the highest seed. Dashed: the score of guessing. The runs must have
been evaluated as they trained, with +evaluation=reasoning and evaluation.every_steps.

python -m analysis.recipe.fig05_reasoning --runs runs/mxfp8_vs_bf16
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import TWO_COLUMNS, make_figure, plt
from mxstudy.results import curves_of, draw_arm, in_tokens, legend

# {name of a score in an evaluation: what it is, and the key of its shots}
PANELS = {
    "mmlu.mcf": ("MMLU", "config.evaluation.task_shots.mmlu"),
    "average_of_9.cf": ("average of nine tasks", "config.evaluation.shots"),
}


def draw(rows: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Draw the figure.

    `rows` have fingerprint, tokens, and for each of PANELS NAME/score and NAME/chance. Raises ValueError if no run has
    one of these, if runs were asked with different numbers of shots, or if two runs of an arm have equal seeds.
    """
    figure, panels = plt.subplots(1, len(PANELS), figsize=(TWO_COLUMNS, 2.4))
    for axes, (name, (words, key)) in zip(panels, PANELS.items(), strict=True):
        asked = rows.dropna(subset=f"{name}/score") if f"{name}/score" in rows else rows[:0]
        if asked.empty:
            raise ValueError(f"--runs: no run was asked {name}; train with +evaluation=reasoning")
        shots = runs.loc[runs["fingerprint"].isin(asked["fingerprint"]), key].unique()
        if len(shots) > 1:
            found = " and ".join(f"{number:g}" for number in shots)
            raise ValueError(f"--runs: runs with {found} shots of {name}; choose by --only")
        percent = asked.assign(percent=100 * asked[f"{name}/score"])
        for curves in curves_of(percent, runs, "percent", "tokens"):
            draw_arm(axes, curves)
        chance = 100 * asked[f"{name}/chance"].iloc[0]
        axes.axhline(chance, color="0.5", linewidth=0.8, linestyle="--", label="one who guesses")
        axes.set(title=f"{words}, {int(shots[0])} shot{'' if shots[0] == 1 else 's'}", ylabel="right, %")
        in_tokens(axes)
    legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxfp8_fig05_reasoning", __doc__, arguments, draw, "evaluation", "runs")


if __name__ == "__main__":
    main()
