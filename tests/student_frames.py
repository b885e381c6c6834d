"""Make frames of results.load as stacks of students have them, without any stack."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.students import arms


def replica(fingerprint: str, number: int = 0, *, lost: float = math.nan, **columns: object) -> dict[str, object]:
    """Return a row of results.load(.., "runs") for a replica that learns, or diverges at step `lost`."""
    return {
        "fingerprint": fingerprint,
        "replica": number,
        "label": fingerprint,
        "state": "finished",
        "config.seed": number,
        "config.data_seed": 0,
        "config.loss": "mse",
        "choice.precision": "mxfp8",
        "loss": math.nan if lost == lost else 0.25 + 0.25 * number,
        "lr": 6e-4,
        "outcome.spikes": int(lost == lost),
        "outcome.unrecovered": int(lost == lost),
        "outcome.censored": 0,
        "outcome.first_spike": lost,
        "outcome.diverged_at": lost,
        "outcome.rising_at": math.nan,
    } | columns


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return arms.ended_replicas(pd.DataFrame(rows))


def curve(fingerprint: str, number: int, losses: np.ndarray, **columns: object) -> pd.DataFrame:
    step = np.arange(len(losses))
    identity = {"fingerprint": fingerprint, "label": fingerprint, "replica": number, "step": step}
    return pd.DataFrame(identity | {"loss": losses, "grad_norm": losses} | columns)
