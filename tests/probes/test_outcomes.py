"""A run's outcome is right for curves made by hand, and for random ones by the literal definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from each import each

from mxstudy.probes.outcomes import Outcome, outcome
from mxstudy.reader import ConfigError

NAN, INF = math.nan, math.inf


def curve(steps: int, **parts: tuple[int, int, float]) -> list[float]:
    """Return losses of 1.0, but for the parts: (first step, how many, loss)."""
    losses = [1.0] * steps
    for start, count, loss in parts.values():
        losses[start : start + count] = [loss] * count
    return losses


QUIET = Outcome(0, 0, 0, None, None, None)


@each("losses", [[], [3.0], [NAN, 1.0], [1e9, 1.0, 1.0], [5.0, 4.0, 3.0, 29.0, 2.0]])
def test_runs_without_event(losses: list[float]) -> None:
    """A high start is no event, and neither is a start that is not finite but recovers."""
    assert outcome(losses) == QUIET


@each(("loss", "spikes"), [(100.0, 0), (math.nextafter(100.0, 200), 1), (INF, 1), (NAN, 1)])
def test_a_spike_is_more_than_100_times_the_loss_before(loss: float, spikes: int) -> None:
    assert outcome(curve(2000, up=(700, 1, loss))) == Outcome(spikes, 0, 0, 700 if spikes else None, None, None)


@pytest.mark.parametrize(("up", "unrecovered"), [(500, 0), (501, 1)])
def test_back_after_exactly_500_steps_is_in_time(up: int, unrecovered: int) -> None:
    """A loss that goes up at 700 is below 10 times the best again at 1200 or 1201."""
    found = outcome(curve(3000, up=(700, up, 500.0)))
    assert found == Outcome(1, unrecovered, 0, 700, 700 if unrecovered else None, None)


@pytest.mark.parametrize(("loss", "unrecovered"), [(math.nextafter(10.0, 0), 0), (10.0, 1)])
def test_back_is_below_10_times_the_best(loss: float, unrecovered: int) -> None:
    found = outcome(curve(3000, up=(700, 1, 500.0), after=(701, 2299, loss)))
    assert (found.unrecovered, found.diverged_at) == (unrecovered, 700 if unrecovered else None)


def test_the_best_is_that_before_the_spike() -> None:
    """The best is 0.1, so 5.0 after the spike is no recovery, although it is below 10 times the loss just before."""
    found = outcome([0.1, *curve(2999, up=(700, 1, 500.0), after=(701, 2298, 5.0))])
    assert (found.spikes, found.unrecovered) == (1, 1)


@pytest.mark.parametrize(("start", "censored"), [(1499, 0), (1500, 1)])
def test_the_last_500_steps_are_censored(start: int, censored: int) -> None:
    """A loss that goes up at 1499 of 2000 steps has 500 left, those to 1999."""
    found = outcome(curve(2000, up=(start, 2000 - start, 500.0)))
    assert found == Outcome(1, 1 - censored, censored, start, None if censored else start, start if censored else None)


def test_a_late_spike_is_censored_also_where_it_has_recovered() -> None:
    assert outcome(curve(2000, up=(1900, 3, 500.0))) == Outcome(1, 0, 1, 1900, None, None)


def test_a_slow_blow_up_jumps_nowhere_and_diverges() -> None:
    losses = [1.0] * 1000 + [1.01**t for t in range(2000)]
    first = 1000 + next(t for t in range(2000) if 1.01**t > 10)
    assert outcome(losses) == Outcome(0, 0, 0, None, first, None)
    assert outcome(losses[: first + 500]) == Outcome(0, 0, 0, None, None, first)


@pytest.mark.parametrize("loss", [NAN, INF])
def test_what_is_not_finite_is_infinite(loss: float) -> None:
    assert outcome(curve(3000, up=(700, 2300, loss))) == Outcome(1, 1, 0, 700, 700, None)
    assert outcome([loss] * 3000) == Outcome(0, 0, 0, None, 0, None)
    assert outcome([loss] * 500) == Outcome(0, 0, 0, None, None, 0)
    assert outcome([loss] * 500 + [7.0] * 500) == QUIET


def test_several_spikes_each_have_an_outcome() -> None:
    losses = curve(4000, one=(100, 20, 500.0), two=(1000, 900, 900.0), three=(3800, 1, 200.0))
    assert outcome(losses) == Outcome(3, 1, 1, 100, 1000, None)


def test_thresholds_are_arguments() -> None:
    assert outcome([1.0, 3.0, 3.0, 1.0], jump=2.0, recovery=1.5, within=1) == Outcome(1, 1, 0, 1, 1, None)
    assert outcome([1.0, 3.0, 3.0, 1.0], jump=2.0, recovery=1.5, within=2) == Outcome(1, 0, 0, 1, None, None)


@pytest.mark.parametrize(("given", "says"), [({"losses": [1.0, -1.0]}, "negative"), ({"losses": [], "within": 0}, "1")])
def test_what_makes_no_sense_is_refused(given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        outcome(**given)


def literally(losses: Sequence[float], jump: float, recovery: float, within: int) -> Outcome:
    """Apply the definitions, one quantifier after the other."""
    last = len(losses) - 1

    def best_before(t: int) -> float:
        return min((x for x in losses[:t] if math.isfinite(x)), default=INF)

    def comes_back(t: int) -> bool:
        later = [losses[s] for s in range(t + 1, min(t + within, last) + 1)]
        return any(math.isfinite(x) and x < recovery * best_before(t) for x in later)

    def is_up(t: int) -> bool:
        return not math.isfinite(losses[t]) or losses[t] > recovery * best_before(t)

    def jumps(t: int) -> bool:
        before, now = losses[t - 1], losses[t]
        return math.isfinite(before) and (not math.isfinite(now) or now > jump * before)

    spikes = [t for t in range(1, last + 1) if jumps(t)]
    judged = [t for t in spikes if t + within <= last]
    stays = [t for t in range(last + 1) if is_up(t) and not comes_back(t)]
    diverged = [t for t in stays if t + within <= last]
    return Outcome(
        len(spikes),
        sum(not comes_back(t) for t in judged),
        len(spikes) - len(judged),
        spikes[0] if spikes else None,
        diverged[0] if diverged else None,
        stays[0] if stays and not diverged else None,
    )


@each("seed", range(300))
def test_random_curves_by_the_letter(seed: int) -> None:
    """The curves have few levels, so that ties happen, with jumps up and down and values that are not finite."""
    draw = np.random.default_rng(seed)
    steps = int(draw.integers(1, 60))
    moves = draw.choice([-2, -1, 0, 0, 0, 1, 2], size=steps)
    losses = 2.0 ** np.cumsum(moves)
    losses[draw.random(steps) < draw.choice([0.0, 0.05, 0.5])] = draw.choice([NAN, INF])
    settings = {"jump": 2.0, "recovery": 4.0, "within": int(draw.integers(1, 12))}
    assert outcome(losses, **settings) == literally(losses.tolist(), **settings)
