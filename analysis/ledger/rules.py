"""Decide a claim by where its interval must lie, by which margin, and where the margin is from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from analysis.statistics import ALPHA, LEAST_UNITS, Effect, Found

REPRODUCED, CONTRADICTED, UNCLEAR = "reproduced", "contradicted", "cannot tell"
MOST_UNITS = 400  # to look for a decision


@dataclass(frozen=True)
class Range:
    """A range in which the interval must lie.

    For an `equivalence` the interval is that of two one-sided tests: 90 % where others have 95 %.
    """

    low: float
    high: float
    equivalence: bool = False

    def holds(self, found: Found, rate: float) -> bool:
        """Return whether the interval lies inside the range, at an error rate.

        It is never true for an equivalence if a run of either arm died.
        """
        return self.covers(found, rate) and not (self.equivalence and found.died[0])

    def covers(self, found: Found, rate: float) -> bool:
        low, high = found.interval(1 - 2 * rate if self.equivalence else 1 - rate)
        return self.low < low and high < self.high


@dataclass(frozen=True)
class Rule:
    """A rule. `words` state it with its margin and the margin's source."""

    words: str
    reproduced: Range
    contradicted: tuple[Range, ...]

    def needed(self, found: Effect, rate: float = ALPHA) -> int | None:
        """Return the least number of units with the mean and spread of these that decides, or None above MOST_UNITS."""
        for units in range(max(LEAST_UNITS, found.count + 1), MOST_UNITS + 1):
            if self.verdict(replace(found, planned=units), rate) != UNCLEAR:
                return units
        return None

    def price(self, found: Found, unit: str, rate: float = ALPHA) -> str:
        """Return how many units would decide what these cannot, '14 pairs of seeds', or '' where there is no spread."""
        if not isinstance(found, Effect) or found.count < 2:  # arithmetic has no spread
            return ""
        return f"{self.needed(found, rate) or f'over {MOST_UNITS}'} {unit}"

    def verdict(self, found: Found, rate: float = ALPHA) -> str:
        """Return the verdict at an error rate.

        An interval in both ranges is reproduced, but a difference that is clear and equal within the margin is not.
        """
        if not found.is_enough:
            return UNCLEAR
        is_small = any(one.equivalence and one.covers(found, rate) for one in self.contradicted)
        if self.reproduced.holds(found, rate) and not is_small:
            return REPRODUCED
        return CONTRADICTED if any(one.holds(found, rate) for one in self.contradicted) else UNCLEAR


def higher(margin: float, source: str) -> Rule:
    """Return the rule for a difference that is claimed to be above 0. Within the margin the arms are equal."""
    ranges = Range(-inf, 0), Range(-margin, margin, equivalence=True)
    return Rule(f"above 0; equal within ±{margin:g} ({source}) contradicts", Range(0, inf), ranges)


def lower(margin: float, source: str) -> Rule:
    ranges = Range(0, inf), Range(-margin, margin, equivalence=True)
    return Rule(f"below 0; equal within ±{margin:g} ({source}) contradicts", Range(-inf, 0), ranges)


def any_higher(margin: float, source: str) -> Rule:
    """Return the rule for a difference that is claimed to be above 0, by however little; below the margin it is not."""
    return Rule(f"above 0; below {margin:g} ({source}) contradicts", Range(0, inf), (Range(-inf, margin),))


def any_lower(margin: float, source: str) -> Rule:
    return Rule(f"below 0; above {-margin:g} ({source}) contradicts", Range(-inf, 0), (Range(-margin, inf),))


def equal(margin: float, source: str) -> Rule:
    """Return the rule for arms that are claimed to be equal."""
    outside = Range(-inf, -margin), Range(margin, inf)
    return Rule(f"within ±{margin:g} ({source})", Range(-margin, margin, equivalence=True), outside)


def between(low: float, high: float, source: str) -> Rule:
    """Return the rule for a number that is claimed to lie in a range, or that is printed, to its last digit."""
    outside = tuple(r for r in (Range(-inf, low), Range(high, inf)) if r.low < r.high)
    shown = f"above {low:.7g}" if high == inf else f"below {high:.7g}" if low == -inf else f"{low:.7g} to {high:.7g}"
    return Rule(f"{shown} ({source})", Range(low, high), outside)


def none_of_them(what: str) -> Rule:
    """Return the rule for arithmetic that must hold in all cases.

    The number of cases in which it does not hold must be 0.
    """
    return Rule(f"0 {what}", Range(-0.5, 0.5), (Range(0.5, inf),))
