"""Make flat configs of runs that tests sort into arms, as a table of runs has them."""

from __future__ import annotations

from typing import Any

from mxstudy.tracking.arms import Described

NORMS: dict[str, dict[str, Any]] = {
    "rmsnorm": {"norm.kind": "rmsnorm"},
    "mxnorm_p1": {"norm.kind": "mxnorm", "norm.p": 1.0},
    "mxnorm_p2": {"norm.kind": "mxnorm", "norm.p": 2.0},
}


def pretrain(norm: str = "rmsnorm", precision: str = "mxfp8", **values: Any) -> dict[str, Any]:
    """Return the flat config of a pre-training. In a keyword, __ stands for the dot of a key."""
    plan = {"precision.schedule.0.from_step": 0, "precision.schedule.0.plan.layers.*": precision}
    given = {key.replace("__", "."): value for key, value in values.items()}
    return {"study": "pretrain", "seed": 0, "data_seed": 0} | NORMS[norm] | plan | given


def run(norm: str = "rmsnorm", precision: str = "mxfp8", **values: Any) -> Described:
    return Described(pretrain(norm, precision, **values), {"norm": norm, "precision": precision})


def evaluate(checkpoint: str) -> Described:
    config = {"study": "evaluate", "checkpoint": checkpoint}
    return Described(config, {"norm": "as_trained", "precision": "as_trained", "experiment": "olmes"})
