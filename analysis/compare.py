"""Compare arms: means with 95 % intervals over seeds, and differences paired by seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from mxstudy import results

SEEDS = ("config.seed", "config.data_seed")
CONFIDENCE = 0.95
# Prefixes of columns that change no number of a run; the runs that are compared here are pre-training runs.
COSMETIC = tuple(f"{column}." for column in results.cosmetic_columns("pretrain"))


def ended(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["state"].isin(["finished", "diverged"])]


@dataclass(frozen=True)
class Mean:
    """The mean of `count` numbers, with the half-width of its t interval, NaN for fewer than two numbers."""

    value: float
    half_width: float
    count: int

    def __str__(self) -> str:
        if self.count == 0:
            return "-"
        spread = f" ± {self.half_width:.4f}" if self.count > 1 else ""
        return f"{self.value:.4f}{spread} ({self.count})"

    @property
    def excludes_zero(self) -> bool:
        return bool(abs(self.value) > self.half_width)  # False for NaN


def mean(values: pd.Series) -> Mean:
    """Return the mean of the finite values, with its interval."""
    finite = values[np.isfinite(values.astype(float))].astype(float)
    count = len(finite)
    if count < 2:
        return Mean(float(finite.mean()) if count else np.nan, np.nan, count)
    half_width = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * finite.std(ddof=1) / np.sqrt(count)
    return Mean(float(finite.mean()), float(half_width), count)


def differing(runs: pd.DataFrame) -> list[str]:
    """Return the config columns in which the runs differ, without seeds and cosmetic columns."""
    config = [c for c in runs if c.startswith("config.") and c not in SEEDS and not f"{c}.".startswith(COSMETIC)]
    return [column for column in config if runs[column].map(str).nunique() > 1]


def paired(runs: pd.DataFrame, column: str, arm: pd.Series, baseline: pd.Series, varied: Iterable[str]) -> Mean:
    """Return the mean of arm - baseline over pairs of runs with equal seeds and equal config except for `varied`.

    `arm`, `baseline`: bool, one per run. `varied`: the config groups in which the two arms differ.
    """
    groups = tuple(f"config.{group}." for group in varied)
    key = [*SEEDS, *(name for name in differing(runs) if not name.startswith(groups))]
    names = [name for name in key if name in runs]
    one, other = (runs[chosen].groupby(names, dropna=False)[column].mean() for chosen in (arm, baseline))
    return mean((one - other).dropna())
