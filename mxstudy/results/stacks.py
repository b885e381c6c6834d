"""Rows of a stack of replicas, as if each replica were a run: one per replica, and one per step and replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from mxstudy.config import StudentTeacher
from mxstudy.probes.outcomes import outcome_of
from mxstudy.tracking.columnar_journal import NAMES, read_columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Row

STACK_PROBES = ("last_bin", "gradient_bias", "coupled_gradient_bias", "sharpness")


def replica_rows(folder: RunFolder, config: StudentTeacher, of_stack: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per replica of a stack: they share the fingerprint, and each has its own seed and learning rate.

    `of_stack`: the columns that all replicas share. Column `first_not_finite`: the first step whose loss or gradient
    norm is not finite. Columns `outcome.*`: how the replica ended, as mxstudy.probes.outcomes judges it.
    """
    state, values = folder.status().state, read_columns(folder.columns, len(config.replicas))
    rows = []
    for replica, about in enumerate(replica_columns(folder, config)):
        losses, grad_norms = values[:, 0, replica], values[:, 1, replica]
        finite = np.isfinite(losses) & np.isfinite(grad_norms)
        ended = bool(len(finite)) and not finite[-1]
        rows.append(
            of_stack
            | about
            | {
                "config.seed": about["seed"],
                "config.lr": about["lr"],
                "state": "diverged" if ended and state == "finished" else state,
                "loss": losses[-1] if len(losses) else math.nan,
                "best_loss": losses[finite].min() if finite.any() else math.nan,
                "grad_norm": grad_norms[-1] if len(losses) else math.nan,
                "first_not_finite": math.nan if finite.all() else int(np.argmin(finite)),
            }
            | {f"outcome.{key}": math.nan if v is None else v for key, v in outcome_of(losses)._asdict().items()}
        )
    return rows


def replica_columns(folder: RunFolder, config: StudentTeacher) -> list[dict[str, Any]]:
    """Return the first columns of each replica's rows, which identify its run and the replica."""
    fingerprint, label = folder.status().fingerprint, folder.label
    return [
        {
            "fingerprint": fingerprint,
            "label": f"{label} seed={seed} lr={lr:g}",
            "replica": replica,
            "seed": seed,
            "lr": lr,
            "data_seed": config.data_seed,
        }
        for replica, (seed, lr) in enumerate(config.replicas)
    ]


def replica_metrics(folder: RunFolder) -> pd.DataFrame:
    config = folder.config_of(StudentTeacher)
    values = read_columns(folder.columns, len(config.replicas))
    replicas = pd.DataFrame(short_columns(folder, config))
    frame = replicas.loc[replicas.index.repeat(len(values))].reset_index(drop=True)
    columns = {name: values[:, number].T.ravel() for number, name in enumerate(NAMES)}
    return frame.assign(step=np.tile(np.arange(len(values)), len(replicas)), **columns)


def replica_probe(folder: RunFolder, rows: Sequence[Row]) -> pd.DataFrame:
    """Return one row per measurement and replica from a probe's rows, whose values are lists [S]."""
    replicas = short_columns(folder, folder.config_of(StudentTeacher))
    return pd.DataFrame(
        [
            about | {"step": row["step"]} | {key: numbers[replica] for key, numbers in row["values"].items()}
            for row in rows
            for replica, about in enumerate(replicas)
        ]
    )


def short_columns(folder: RunFolder, config: StudentTeacher) -> list[dict[str, Any]]:
    names = ("fingerprint", "label", "replica", "seed")
    return [{name: columns[name] for name in names} for columns in replica_columns(folder, config)]
