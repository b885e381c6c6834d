"""Judge a run's end by its losses: spikes, spikes without recovery, and divergence, slow or sudden.

A spike is, as in the instability paper (figure 9), a loss of more than 100 times the one before. Two rules are ours:
a run has recovered if its loss falls below 10 times its best within 500 steps, and a divergence need not begin with a
spike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mxstudy.reader import require


class Outcome(NamedTuple):
    """How a run ended. Steps count from 0; None means that there is no such step.

    `spikes`: number of all spikes. `unrecovered`: spikes before the last `within` steps that did not recover in time.
    `censored`: spikes in the last `within` steps, whatever followed. `first_spike`: step of the first spike.
    `diverged_at`: first step from which the loss stays up for more than `within` steps. It is up once it exceeds
    `recovery` times the best loss before, until it falls below that. `rising_at`: if the loss is up at the end, too
    late to tell whether the run diverges, the step since which it is up.
    """

    spikes: int
    unrecovered: int
    censored: int
    first_spike: int | None
    diverged_at: int | None
    rising_at: int | None


def outcome(losses: Sequence[float], jump: float = 100.0, recovery: float = 10.0, within: int = 500) -> Outcome:
    """Return the outcome of one run's losses [steps]; a loss that is not finite counts as infinite.

    A spike at step t: loss_t > jump * loss_{t-1}. It has recovered if a loss of steps t + 1 to t + within is below
    recovery * min(loss_0 .. loss_{t-1}). Raises ConfigError for a negative loss or `within` < 1.
    """
    require(within >= 1, f"within: must be at least 1 step, not {within}")
    curve = np.array(losses, dtype=np.float64)
    curve[~np.isfinite(curve)] = np.inf
    require(not (curve < 0).any(), "losses: must not be negative, because spikes are ratios; leave such runs out")
    limits = recovery * np.minimum.accumulate(np.concatenate(([np.inf], curve)))[:-1]
    spikes = 1 + np.flatnonzero(curve[1:] > jump * curve[:-1])
    judged = spikes[spikes < len(curve) - within]
    unrecovered = [step for step in judged if return_step(curve, limits, step, within) is None]
    return Outcome(
        len(spikes),
        len(unrecovered),
        len(spikes) - len(judged),
        int(spikes[0]) if len(spikes) else None,
        *last_excursion(curve, limits, within),
    )


def outcome_of(recorded: np.ndarray) -> Outcome:
    """Return the outcome of a journal's losses [steps]; a KL that rounding made negative counts as 0."""
    return outcome(np.maximum(recorded, 0.0))


def return_step(curve: np.ndarray, limits: np.ndarray, step: int, within: int) -> int | None:
    """Return the first of `within` steps after `step` whose loss is below the limit at `step`, or None if none is."""
    below = np.flatnonzero(curve[step + 1 : step + 1 + within] < limits[step])
    return step + 1 + int(below[0]) if len(below) else None


def last_excursion(curve: np.ndarray, limits: np.ndarray, within: int) -> tuple[int | None, int | None]:
    """Return (diverged_at, rising_at): the start of the first excursion over the limit that does not end in time.

    While the loss is up, its best and therefore the limit stay the same. Before the first finite loss there is no
    limit, and an infinite loss is up.
    """
    starts = np.flatnonzero((curve > limits) | np.isinf(curve))
    while len(starts):
        step = int(starts[0])
        back = return_step(curve, limits, step, within)
        if back is None:
            return (step, None) if step < len(curve) - within else (None, step)
        starts = starts[starts >= back]
    return None, None
