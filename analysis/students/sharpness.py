"""Sharpness relative to the stability bound of the learning rate, above the loss (instability paper, B.2, Eq. 10).

It is the learning rate times the largest eigenvalue of the FP32 loss's Hessian, and of the Hessian preconditioned by
Adam's sqrt(v). Dotted, dash-dotted: limits above which gradient descent (2) and Adam with its default beta1 (38; Cohen
et al. 2022) are unstable along that direction. Below: the left side of Eq. 10; above 1, the paper's bound is violated.
Lines: medians over replicas; bands: their middle half. Thin lines: replicas that diverged.

python -m analysis.students.sharpness --runs runs/gradient_bias
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.command import command
from analysis.students.measures import Row, make_measures

KINDS = {"hessian": ("Hessian", "#0072B2", 2.0), "preconditioned": ("preconditioned", "#D55E00", 38.0)}


def rows_of(sharpness: pd.DataFrame) -> list[Row]:
    there = {kind: row for kind, row in KINDS.items() if f"{kind}/eigenvalue" in sharpness}
    scaled = sharpness.assign(**{kind: sharpness["lr"] * sharpness[f"{kind}/eigenvalue"] for kind in there})
    eigenvalues = {name: (kind, color) for kind, (name, color, _) in there.items()}
    levels = {f"stable up to\n{level:g}, {name}": level for name, _, level in there.values()}
    bounds = {name: (f"{kind}/stability", color) for kind, (name, color, _) in there.items()}
    return [
        Row("learning rate x\neigenvalue", scaled, eigenvalues, levels, "log"),
        Row("Eq. 10,\nleft side", scaled, bounds, {"bound": 1.0}, "log"),
    ]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_measures("student_sharpness", __doc__, arguments, rows_of, ["precision", "fidelity"], "sharpness")


if __name__ == "__main__":
    main()
