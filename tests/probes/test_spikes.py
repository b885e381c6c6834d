"""The spike score equals its definition in plain Python."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from each import each

from mxstudy.probes.spikes import is_cut, spike_score
from mxstudy.reader import ConfigError


def by_definition(losses: list[float], window: int = 8, tail: float = 0.3, threshold: float = 3.0) -> float:
    """Compute MXNorm paper, Eq. 22, term by term."""
    sigma = statistics.pstdev(losses[-round(tail * len(losses)) :])
    return sum(
        max((loss - min(losses[max(0, t - window + 1) : t + 1])) / sigma - threshold, 0.0)
        for t, loss in enumerate(losses)
    )


def noisy(steps: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [2 + 3 * math.exp(-step / 50) + draw.gauss(0, 0.05) for step in range(steps)]


@each("seed", range(5))
@each("arguments", [{}, {"window": 1}, {"window": 20, "tail": 0.5, "threshold": 1.0}, {"tail": 1.0}])
def test_is_its_definition(seed: int, arguments: dict) -> None:
    losses = noisy(200, seed)
    losses[60], losses[120], losses[121] = 9.0, 4.0, 3.0
    assert spike_score(losses, **arguments) == pytest.approx(by_definition(losses, **arguments), rel=1e-9)


def test_a_spike_counts_by_its_height_over_the_recent_minimum() -> None:
    losses = [1.0, 3.0] * 50  # sigma is 1 over any tail of even length, so 2 above the minimum is below the threshold
    assert spike_score(losses) == 0.0
    assert spike_score([*losses[:40], 11.0, *losses[41:]]) == 7.0


def test_the_window_ends_with_the_step_itself_and_is_eight_long() -> None:
    tail = [1.0, 3.0] * 50
    rise = [0.0, *[5.5] * 20]  # over 0 by 5.5 for the seven steps that still see it
    assert spike_score(rise + tail) == pytest.approx(7 * 2.5)


def test_a_falling_loss_has_no_spikes() -> None:
    assert spike_score([10.0 / (step + 1) for step in range(100)]) == 0.0


@each("end", [math.nan, math.inf, -math.inf])
def test_is_cut_at_the_first_value_that_is_not_finite(end: float) -> None:
    losses = noisy(100, seed=0)
    losses[30] = 9.0
    assert spike_score([*losses, end, 50.0, 1.0]) == spike_score(losses) > 0
    assert is_cut([*losses, end])
    assert not is_cut(losses)


def test_without_a_spread_there_is_no_score() -> None:
    assert spike_score([5.0, 9.0, *[0.1] * 100]) == 0.0  # the std of a hundred times 0.1 is not quite 0
    assert spike_score([2.0]) == spike_score([]) == spike_score([math.nan]) == 0.0


@each("arguments", [{"window": 0}, {"tail": 0.0}, {"tail": 1.5}])
def test_a_window_or_tail_without_a_step_is_refused(arguments: dict) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(arguments))}: "):
        spike_score([1.0, 2.0], **arguments)
