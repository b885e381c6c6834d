"""How a run ended, from its losses: jumps, spikes that it never came back from, and divergence, slow or sudden.

The jump is the instability paper's spike (figure 9): a loss of more than 100 times the one before. Two rules are
ours: a run has come back if it is below 10 times its best within 500 steps; and a divergence may begin without a jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mxstudy.reader import require


class Outcome(NamedTuple):
    """`spikes` are all jumps. Of those before the last `within` steps `unrecovered` did not come back in time.

    `censored`: those in the last `within` steps, whatever followed. `first_spike`: its step, from 0; None for none.
    `diverged_at`: the first step from which the loss stays up for more than `within` steps, up meaning more than
    `recovery` times the best before it, and not below that since; None for none. `rising_at`: a run that did not
    diverge is up at its end, but not for long enough to tell; since when.
    """

    spikes: int
    unrecovered: int
    censored: int
    first_spike: int | None
    diverged_at: int | None
    rising_at: int | None


def outcome(losses: Sequence[float], jump: float = 100.0, recovery: float = 10.0, within: int = 500) -> Outcome:
    """Of one run's losses [steps], not negative; a loss that is not finite counts as infinite.

    A spike at step t: loss_t > jump * loss_{t-1}. It has recovered if a loss of steps t + 1 to t + within is below
    recovery * min(loss_0 .. loss_{t-1}). Raises ConfigError for a negative loss or a window without a step.
    """
    require(within >= 1, f"within: at least 1 step, not {within}")
    curve = np.array(losses, dtype=np.float64)
    curve[~np.isfinite(curve)] = np.inf
    require(not (curve < 0).any(), "losses: their ratios say nothing where one is negative")
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
    """Of losses as a journal has them [steps]: KL of nearly equal distributions may be rounded to less than 0."""
    return outcome(np.maximum(recorded, 0.0))


def return_step(curve: np.ndarray, limits: np.ndarray, step: int, within: int) -> int | None:
    """The first of the `within` steps after `step` whose loss is below what was the limit at `step`."""
    below = np.flatnonzero(curve[step + 1 : step + 1 + within] < limits[step])
    return step + 1 + int(below[0]) if len(below) else None


def last_excursion(curve: np.ndarray, limits: np.ndarray, within: int) -> tuple[int | None, int | None]:
    """(diverged_at, rising_at): where the first excursion over the limit began that does not end in time, if one does.

    While the loss is up its best stays what it was, and so does the limit. Before the first finite loss there is none,
    and an infinite loss is up.
    """
    starts = np.flatnonzero((curve > limits) | np.isinf(curve))
    while len(starts):
        step = int(starts[0])
        back = return_step(curve, limits, step, within)
        if back is None:
            return (step, None) if step < len(curve) - within else (None, step)
        starts = starts[starts >= back]
    return None, None
