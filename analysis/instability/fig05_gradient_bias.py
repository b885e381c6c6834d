"""Distance of gradients from those in FP32, above the loss (instability paper, figure 5 and Eq. 5).

Ratio: ||g - h|| / ||h||, a lower bound on the operator norm of zeta, and its square, which the paper's public code
logs. Same weights: h is the FP32 gradient at the run's own weights and batch. Coupled: h is the gradient of an FP32 run
with the same seeds at the same step, as in the paper. Dotted: the value for two unrelated gradients of equal length.
Lines: medians over replicas; bands: their middle half. Thin lines: replicas that diverged.

python -m analysis.instability.fig05_gradient_bias --runs runs/gradient_bias
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.command import command
from analysis.students.measures import Row, make_measures

COLORS = {"same weights": "#0072B2", "coupled": "#D55E00"}
QUANTITIES = {  # {quantity of the whole model: title, value for unrelated gradients of equal length, scale of the axis}
    "ratio": ("zeta: ratio", 2**0.5, "log"),
    "squared_ratio": ("zeta: squared\nratio", 2.0, "log"),
    "cosine": ("cosine", 0.0, "linear"),
}


def rows_of(same: pd.DataFrame, coupled: pd.DataFrame) -> list[Row]:
    keys = ["fingerprint", "replica", "step"]
    both = [frame.set_index(keys)[[f"model/{q}" for q in QUANTITIES]] for frame in (same, coupled)]
    joined = pd.concat(dict(zip(COLORS, both, strict=True)), axis=1)
    joined.columns = [f"{mode} {name}" for mode, name in joined.columns]
    return [
        Row(
            title,
            joined.reset_index(),
            {mode: (f"{mode} model/{quantity}", color) for mode, color in COLORS.items()},
            {"unrelated": unrelated},
            scale,
        )
        for quantity, (title, unrelated, scale) in QUANTITIES.items()
    ]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    probes = ("gradient_bias", "coupled_gradient_bias")
    make_measures("instability_fig05_gradient_bias", __doc__, arguments, rows_of, ["precision", "fidelity"], *probes)


if __name__ == "__main__":
    main()
