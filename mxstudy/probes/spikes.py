"""The spike score of a finished loss curve (MXNorm paper, Eq. 22)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mxstudy.reader import require


def spike_score(losses: Sequence[float], window: int = 8, tail: float = 0.3, threshold: float = 3.0) -> float:
    """Area above `threshold` standard deviations: sum of max((L_t - min(L_{t-window+1..t})) / sigma - threshold, 0).

    sigma is the standard deviation (ddof 0) of the raw loss over the last `tail` of the steps. A curve is cut at its
    first non-finite value (`is_cut`); where sigma is 0, or nothing is left, the score is 0.
    Raises ConfigError for a window or a tail that holds no step.
    """
    require(window >= 1, f"window: at least 1 step, not {window}")
    require(0 < tail <= 1, f"tail: a share of the steps, over 0 and at most 1, not {tail}")
    curve = finite_part(losses)
    if not len(curve):
        return 0.0
    last = curve[-max(1, round(tail * len(curve))) :]
    if np.ptp(last) == 0:  # the mean of equal numbers is rounded, so that their std need not be 0
        return 0.0
    sigma = last.std()
    padded = np.concatenate((np.full(window - 1, np.inf), curve))
    rolling_minimum = np.lib.stride_tricks.sliding_window_view(padded, window).min(axis=1)
    return float(np.maximum((curve - rolling_minimum) / sigma - threshold, 0.0).sum())


def is_cut(losses: Sequence[float]) -> bool:
    """Whether a non-finite value ends the curve before its end."""
    return len(finite_part(losses)) < len(losses)


def finite_part(losses: Sequence[float]) -> np.ndarray:
    curve = np.asarray(losses, dtype=np.float64)
    broken = np.flatnonzero(~np.isfinite(curve))
    return curve[: broken[0]] if len(broken) else curve
