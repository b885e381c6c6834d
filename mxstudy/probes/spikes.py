"""Find loss spikes from the losses alone: the score of a finished curve (MXNorm paper, Eq. 22), and a detector.

This module does not import torch, so that reading results is fast.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mxstudy.config import Spikes
from mxstudy.reader import require


def spike_score(losses: Sequence[float], window: int = 8, tail: float = 0.3, threshold: float = 3.0) -> float:
    """Return the spike score: the sum over t of max((L_t - min(L_{t-window+1..t})) / sigma - threshold, 0).

    sigma is the standard deviation (ddof 0) of the raw loss over the last `tail` of the steps. A curve is cut at its
    first non-finite value (`is_cut`); if sigma is 0, or nothing is left, the score is 0.
    Raises ConfigError for a window or a tail without a step.
    """
    require(window >= 1, f"window: must be at least 1 step, not {window}")
    require(0 < tail <= 1, f"tail: must be a share of the steps, over 0 and at most 1, not {tail}")
    curve = finite_part(losses)
    if not len(curve):
        return 0.0
    last = curve[-max(1, round(tail * len(curve))) :]
    if np.ptp(last) == 0:  # rounding of the mean can make the std of equal numbers nonzero
        return 0.0
    sigma = last.std()
    padded = np.concatenate((np.full(window - 1, np.inf), curve))
    rolling_minimum = np.lib.stride_tricks.sliding_window_view(padded, window).min(axis=1)
    return float(np.maximum((curve - rolling_minimum) / sigma - threshold, 0.0).sum())


def is_cut(losses: Sequence[float]) -> bool:
    """Return whether the curve has a non-finite value, at which it is cut."""
    return len(finite_part(losses)) < len(losses)


def finite_part(losses: Sequence[float]) -> np.ndarray:
    curve = np.asarray(losses, dtype=np.float64)
    broken = np.flatnonzero(~np.isfinite(curve))
    return curve[: broken[0]] if len(broken) else curve


class Spike(NamedTuple):
    """A spike's loss, and mean and std (ddof 0) of the losses before it; NaN if there are none."""

    loss: float
    mean: float
    std: float


class SpikeDetector:
    """Detects losses > mean + threshold * std of the `window_steps` losses before (OLMo-core's stability monitor).

    No spike is found before the window is full. Every loss enters the window, those of spikes too. Consecutive spiking
    steps are one spike. A loss or gradient norm that is not finite ends a run, and always counts as a spike. The state
    is determined by the last window_steps + 1 of the losses so far.
    """

    def __init__(self, window_steps: int, threshold: float, losses: Sequence[float] = ()) -> None:
        self.threshold = threshold
        self.window: deque[float] = deque(maxlen=window_steps)
        self.is_spiking = False
        for loss in losses[-window_steps - 1 :]:
            self.see(loss)

    def see(self, loss: float, is_finite: bool = True) -> Spike | None:
        """Add a loss; return the spike that begins with it, or None."""
        window = np.array(self.window)
        mean, std = (float(window.mean()), float(window.std())) if len(window) else (math.nan, math.nan)
        is_full, was_spiking = len(window) == self.window.maxlen, self.is_spiking
        self.is_spiking = is_full and loss > mean + self.threshold * std
        self.window.append(loss)
        begins = not is_finite or (self.is_spiking and not was_spiking)
        return Spike(loss, mean, std) if begins else None


def count_spikes(losses: Sequence[float]) -> int:
    """Return the number of spikes that a detector with default settings finds; a non-finite end counts as one."""
    defaults = Spikes()
    detector = SpikeDetector(defaults.window_steps, defaults.threshold)
    return sum(detector.see(loss, math.isfinite(loss)) is not None for loss in losses)
