"""Print the table after a stack of students, or a sweep of stacks: one line per arm, over its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from mxstudy import results
from mxstudy.results.terminal import markdown, show
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary

TITLE = "loss of the last step, over the replicas that are finite"
COLUMNS = ("arm", "runs", "median", "quartiles", "NaN", "spikes", "stuck", "diverged")
NOTES = (
    "NaN: runs that are not finite at the end. spikes: runs with a loss over 100 times the loss before it. stuck: runs",
    "with a spike after which no loss within 500 steps is below 10 times the best loss before it. diverged: runs whose",
    "loss rises above 10 times its best and does not fall below that again within 500 steps, with or without a spike.",
)


def summarise(runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
    """Print the table of the arms and return it for MLflow; no arms are compared, so `baseline` is not used."""
    cells = show_arms(list(runs.values()))
    medians = ", ".join(f"{arm} {median} ({died} of {runs} diverged)" for arm, runs, median, *_, died in cells)
    return Summary("\n\n".join([markdown(TITLE, COLUMNS, cells), *NOTES]), result=f"median loss: {medians}")


def show_arms(folders: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """Print the table and return its rows as text. An arm has the replicas of equal configs, whatever their seeds."""
    replicas = results.with_arms(results.load_runs(folders))
    cells = [(str(arm), *arm_cells(own)) for arm, own in replicas.groupby("arm", sort=False)]
    show(TITLE, COLUMNS, cells, list(NOTES))
    return cells


def arm_cells(replicas: pd.DataFrame) -> tuple[str, ...]:
    """Return the cells of an arm, as text, from the table of its replicas."""
    finite = replicas["loss"][np.isfinite(replicas["loss"]) & np.isfinite(replicas["grad_norm"])]
    low, median, high = (f"{finite.quantile(q):.3g}" if len(finite) else "-" for q in (0.25, 0.5, 0.75))
    counts = (
        len(replicas) - len(finite),
        (replicas["outcome.spikes"] > 0).sum(),
        (replicas["outcome.unrecovered"] > 0).sum(),
        replicas["outcome.diverged_at"].notna().sum(),
    )
    return (str(len(replicas)), median, f"{low} .. {high}", *map(str, counts))
