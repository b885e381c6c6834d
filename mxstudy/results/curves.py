"""Smooth losses for figures."""

from __future__ import annotations

import pandas as pd

HALF_LIFE = 0.01  # half-life of the exponential mean, as a share of a run's steps


def smoothed(losses: pd.Series) -> pd.Series:
    return losses.ewm(halflife=max(1.0, HALF_LIFE * len(losses))).mean()
