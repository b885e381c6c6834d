"""Cost of a training step in emulated MX formats relative to bf16: time and peak memory, one colour per model.

Time: medians over rounds, with half the interquartile range. Dashed line: the baseline, bf16 in the same kernels. MXFP8
with all three: with stochastic rounding, square blocks of weights and a Hadamard transform.

python -m analysis.recipe.train_step_cost --runs runs/train_step.json
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import TWO_COLUMNS, colors, make_figure, plt
from mxstudy.results import legend

STEPS = {  # {arm of the benchmark: its name here and on the page}
    "bf16": "bf16",
    "bf16, fused": "bf16, in the same kernels",
    "bf16, inductor": "bf16 as PyTorch compiles it",
    "bf16, inductor, roundings kept": "bf16 as PyTorch compiles it, roundings kept",
    "bf16, inductor, recomputing": "bf16 as PyTorch compiles it, recomputing all but products",
    "bf16, fused, full checkpointing": "bf16, in the same kernels, full checkpointing",
    "bf16, fused, recomputing MLPs": "bf16, in the same kernels, some MLPs recomputed",
    "mxfp8, rmsnorm": "MXFP8, RMSNorm",
    "mxfp8, rmsnorm, recomputing MLPs": "MXFP8, RMSNorm, some MLPs recomputed",
    "mxfp8, mxnorm_p2": "MXFP8, MXNorm p=2",
    "mxfp4, rmsnorm": "MXFP4, RMSNorm",
    "nvfp4, rmsnorm": "NVFP4 with all its parts, RMSNorm",
    "nvfp4 without random parts, rmsnorm": "NVFP4 without Hadamard transform and stochastic rounding",
    "torchao, rmsnorm": "torchao's MXTensor, RMSNorm",
    "sr_rht_2d, rmsnorm": "MXFP8 with all three, RMSNorm",
}
COSTS = {"over_bf16": "step, over bf16", "peak_over_bf16": "peak memory, over bf16"}


def draw(rows: pd.DataFrame) -> Figure:
    """Draw the figure.

    `rows` have arm, over_bf16, over_bf16_spread, peak_over_bf16 (None on CPU), setting.model, .ffn, .vocabulary, and
    .baseline, which is an arm's name.
    """
    arms = [*dict.fromkeys(rows["arm"][rows["arm"] != rows["setting.baseline"]])]
    models = {
        "{}, FFN {}, vocabulary {:,}".format(*sizes): cases.set_index("arm").reindex(arms)
        for sizes, cases in rows.groupby(["setting.model", "setting.ffn", "setting.vocabulary"], sort=False)
    }
    color_of = colors(models)
    figure, panels = plt.subplots(1, len(COSTS), figsize=(TWO_COLUMNS, 0.7 + 0.25 * len(arms)), sharey=True)
    for axes, (cost, title) in zip(panels, COSTS.items(), strict=True):
        axes.axvline(1, color="black", linewidth=0.6, linestyle="--", label="baseline, bf16")
        for offset, (label, own) in zip(np.linspace(-0.2, 0.2, len(models)), models.items(), strict=True):
            places = np.arange(len(arms)) + (offset if len(models) > 1 else 0)
            spread = own["over_bf16_spread"] if cost == "over_bf16" else None
            values = own[cost].astype(float)
            axes.errorbar(values, places, xerr=spread, fmt="o", ms=4, color=color_of[label], label=label)
        axes.set_xlabel(title)
    panels[0].set_yticks(range(len(arms)), [STEPS.get(arm, arm) for arm in arms])
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("train_step_cost", __doc__, arguments, draw, "benchmark")


if __name__ == "__main__":
    main()
