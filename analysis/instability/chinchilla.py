"""Fit the scaling law L(N, D) = E + A / N^alpha + B / D^beta to runs, with bootstrap intervals.

The fit is that of Hoffmann et al. (2022) with the settings of the instability paper (appendix G): minimise the mean
Huber loss of the residuals of log L, by L-BFGS from a grid of starts, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from analysis.units import need_columns

DELTA = 1e-3  # where the Huber loss turns from quadratic to linear, in nats of log L
STARTS = [(a, b, 0.5, 0.4, 0.4) for a, b in product((5, 10, 15, 20), repeat=2)]  # log A, log B, log E, alpha, beta
COLD_START = STARTS[5]  # for each resample, beside the fit to all runs; in all trials both reached one minimum
MIN_SIZES = 3  # different values of N and of D; a power law with a constant fits any two points

Point = tuple[float, ...]
Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True)
class Chinchilla:
    """The constants of the law, where N is parameters, D tokens and L the loss in the unit of the runs."""

    A: float
    B: float
    E: float
    alpha: float
    beta: float

    @property
    def a(self) -> float:
        """Return the exponent of the optimal N by compute C: N ~ C^a, D ~ C^(1 - a)."""
        return self.beta / (self.alpha + self.beta)

    def loss(self, params: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self.E + self.A / params**self.alpha + self.B / tokens**self.beta

    def optimal_params(self, flops: np.ndarray) -> np.ndarray:
        """Return the N with the lowest loss for C = 6 N D FLOPs (Hoffmann et al., Eq. 4)."""
        ratio = (self.alpha * self.A) / (self.beta * self.B)
        return ratio ** (1 / (self.alpha + self.beta)) * (flops / 6) ** self.a


def fit(runs: pd.DataFrame, loss: str = "loss") -> Chinchilla:
    """Return the law fitted to `runs`, one row per run, with columns params, tokens, and the one that `loss` names.

    Raises ValueError if a column is missing, a value is not positive and finite, there are too few runs, or the losses
    do not fall with N or with D.
    """
    params, tokens, losses = columns(runs, loss)
    law = best(objective(params, tokens, losses), STARTS)
    for name, sizes, factor, exponent in (("params", params, law.A, law.alpha), ("tokens", tokens, law.B, law.beta)):
        with np.errstate(over="ignore", invalid="ignore"):
            largest, smallest = factor / np.array([sizes.min(), sizes.max()]) ** exponent
        if not largest - smallest > DELTA * law.E:  # also where it is NaN
            raise ValueError(
                f"{loss} does not fall with {name} (exponent {exponent:.3g}): these runs follow no such law"
            )
    return law


def bootstrap(runs: pd.DataFrame, loss: str = "loss", resamples: int = 300, seed: int = 0) -> pd.DataFrame:
    """Return the fits to `resamples` bootstrap samples of the runs, one per row, in columns A, B, E, alpha, beta, a.

    Runs of the same N and D are drawn together: a run that a table lists twice is not a second run. Raises as `fit`.
    """
    if resamples < 1:
        raise ValueError(f"resamples: must be positive, not {resamples}")
    start = as_point(fit(runs, loss))
    params, tokens, losses = columns(runs, loss)
    draw = np.random.default_rng(seed)
    groups = list(runs.reset_index(drop=True).groupby(["params", "tokens"]).indices.values())
    laws = []
    for _ in range(resamples):
        rows = np.concatenate([groups[i] for i in draw.integers(len(groups), size=len(groups))])
        laws.append(best(objective(params[rows], tokens[rows], losses[rows]), [start, COLD_START]))
    return pd.DataFrame([vars(law) | {"a": law.a} for law in laws])


def columns(runs: pd.DataFrame, loss: str) -> list[np.ndarray]:
    """Return params, tokens and loss as float64 [runs] each; raise ValueError as described in `fit`."""
    names = ["params", "tokens", loss]
    need_columns(runs, names)
    values = runs[names].apply(pd.to_numeric, errors="coerce").to_numpy(float)
    for row, column in np.argwhere(~(np.isfinite(values) & (values > 0))):
        what = f"{names[column]} of row {runs.index[row]}"
        raise ValueError(f"{what}: must be a positive, finite number, not {runs.iloc[row][names[column]]}")
    distinct, unknowns = len(np.unique(values[:, :2], axis=0)), len(STARTS[0])
    if distinct <= unknowns:
        raise ValueError(f"{distinct} runs of different sizes cannot determine {unknowns} constants; give more")
    for name, sizes in zip(names[:2], values.T, strict=False):
        if len(np.unique(sizes)) < MIN_SIZES:
            raise ValueError(
                f"{name}: the runs have {len(np.unique(sizes))} different values; give at least {MIN_SIZES}"
            )
    return list(values.T)


def objective(params: np.ndarray, tokens: np.ndarray, losses: np.ndarray) -> Objective:
    """Return a function of (log A, log B, log E, alpha, beta): mean Huber loss in units of DELTA^2, and gradient."""
    log_n, log_d, log_l = np.log(params), np.log(tokens), np.log(losses)

    def value(point: np.ndarray) -> tuple[float, np.ndarray]:
        log_a, log_b, log_e, alpha, beta = point
        terms = np.stack([log_a - alpha * log_n, log_b - beta * log_d, np.full_like(log_n, log_e)])
        largest = terms.max(axis=0)  # a bad start must not overflow
        shares = np.exp(terms - largest)
        total = shares.sum(axis=0)
        residual = (largest + np.log(total) - log_l) / DELTA
        slope = np.clip(residual, -1, 1)
        huber = slope * (residual - slope / 2)
        by_a, by_b, by_e = shares / total * slope / (DELTA * len(log_n))
        return huber.mean(), np.array([by_a.sum(), by_b.sum(), by_e.sum(), -by_a @ log_n, -by_b @ log_d])

    return value


def best(function: Objective, starts: Iterable[Point]) -> Chinchilla:
    """Return the lowest of the minima that L-BFGS finds from the starts.

    It runs on one thread: SciPy passes 10 x 10 matrices to BLAS, whose threads would wait for each other on a busy
    machine.
    """
    limits = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-14, "gtol": 1e-9}
    with threadpool_limits(1, "blas"):
        found = [minimize(function, start, jac=True, method="L-BFGS-B", options=limits) for start in starts]
    log_a, log_b, log_e, alpha, beta = map(float, min(found, key=lambda one: one.fun).x)
    with np.errstate(over="ignore"):  # infinite where the runs follow no such law
        a, b, e = map(float, np.exp([log_a, log_b, log_e]))
    return Chinchilla(a, b, e, alpha, beta)


def as_point(law: Chinchilla) -> Point:
    return (*np.log([law.A, law.B, law.E]), law.alpha, law.beta)
