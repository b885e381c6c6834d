"""Judge a claim of a document by what the tables say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

import pandas as pd

from analysis.ledger.rules import UNCLEAR, Rule
from analysis.ledger.tables import Missing, Tables
from analysis.statistics import ALPHA, LEAST_UNITS, Effect, Found
from analysis.units import Arm, chosen, differing, of_one_code, shared_units, units_of

NOT_RUN, IMPOSSIBLE = "not run", "not possible here"
KINDS = ("arithmetic", "kernel", "students", "pre-training", "evaluation")
ARITHMETIC, KERNEL, STUDENTS, PRETRAINING, EVALUATION = KINDS


class NotPossible(Exception):
    """Raised by a judge. The message names the missing hardware, or the GPU hours at the measured rate."""


class Mixed(Exception):
    """Raised by a judge if an arm holds several settings, or if no code has runs of all arms."""


Judge = Callable[[Tables], "Evidence"]
Cost = Callable[[Tables], float]  # minutes of one H200 for all runs of a unit


class Left(TypedDict):
    """How many units are left out, because they are of other code or because an arm lacks runs of them."""

    others: int
    incomplete: int


def in_one_code(
    runs: pd.DataFrame, arms: Sequence[Arm], unit: Sequence[str], over: Sequence[str] = ()
) -> tuple[pd.DataFrame, Left]:
    """Return the runs of one code, and what is left out.

    A unit counts with all of its arms' settings in the columns `over`, or not at all: without its runs at high rates it
    would look as if none of them diverged. Raises Missing if an arm has no runs or no unit has all, and Mixed if an arm
    holds several settings.
    """
    if any(not chosen(runs, arm).any() for arm in arms):
        raise Missing("no runs of an arm in these tables")
    own = of_one_code(runs, arms, unit)
    if not len(own):
        raise Mixed("no seed has all arms in one code")
    parts = [own[chosen(own, arm)] for arm in arms]
    for part in parts:
        if mixed := differing(part, over):
            raise Mixed(f"{mixed[0].removeprefix('config.')} differs within an arm")
    whole = set.intersection(*(whole_units(part, unit, over) for part in parts))
    if not whole:
        raise Missing("no seed has all runs of an arm")
    is_whole = [each in whole for each in own[[*unit]].itertuples(index=False, name=None)]
    left = Left(others=others(runs, own, arms, unit), incomplete=len(units_of(own, unit) - whole))
    return own[is_whole], left


def whole_units(runs: pd.DataFrame, unit: Sequence[str], over: Sequence[str]) -> set[tuple[object, ...]]:
    """Return the units of an arm with all settings in the columns `over` that it has with any unit."""
    settings = runs[[*over]].astype(str).agg(tuple, axis=1) if over else pd.Series("", runs.index)
    by_unit = settings.groupby([runs[key] for key in unit]).transform("nunique")
    return units_of(runs[by_unit == settings.nunique()], unit)


def others(runs: pd.DataFrame, own: pd.DataFrame, arms: Sequence[Arm], unit: Sequence[str]) -> int:
    """Return the number of units with all arms that `runs` has in other code, and `own` lacks."""
    return len(shared_units(runs, arms, unit) - shared_units(own, arms, unit))


@dataclass(frozen=True)
class Evidence:
    """What a judge found: an effect in numbers per `unit`, or one number, and what must be said beside it.

    `verdict` is set only if a rule that was stated before the runs has decided already, or if nothing can decide;
    `price` then says how many units would tell by that rule. `here` is the scale. `others` counts the units that are
    left out because they are of other code, `incomplete` those that are left out because an arm lacks runs, such as
    those at some learning rates.
    """

    found: Found
    unit: str
    note: str = ""
    verdict: str = ""
    price: str = ""
    here: str = ""
    others: int = 0
    incomplete: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Claim:
    """A claim. `id` is its permanent name, `where` its section, figure or equation, and `says` the claim in our words.

    `there` and `here` are the scales at which the document claims it and at which it is judged, unless the judge reads
    the latter from the runs. `arms` are what is compared. `needs` is how many units were planned; LEAST_UNITS suffice
    for a verdict. `comparisons` is the number by which intervals are corrected, if it was stated before the runs.
    `page` describes the runs. `cost` is what a unit takes with all arms that its sweep shares.
    """

    id: str
    where: str
    says: str
    kind: str
    there: str
    judge: Judge
    rule: Rule
    here: str = "the same"
    arms: str = "-"
    needs: int = LEAST_UNITS
    comparisons: int = 1
    page: str = ""
    cost: Cost | None = None

    @property
    def rate(self) -> float:
        """Return the error rate at which the claim is tested."""
        return ALPHA / self.comparisons


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict. `why` replaces a missing effect; `cost` is what a verdict takes."""

    claim: Claim
    verdict: str
    evidence: Evidence | None = None
    why: str = ""
    cost: str = ""

    @property
    def units(self) -> int:
        return self.evidence.found.count if self.evidence else 0

    @cached_property
    def price(self) -> str:
        """Return how many units would tell, with the mean and spread of these, or '' for a verdict or no spread."""
        if self.evidence is None or self.verdict != UNCLEAR:
            return ""
        if self.evidence.verdict:
            return self.evidence.price
        return self.claim.rule.price(self.evidence.found, self.evidence.unit, self.claim.rate)

    @property
    def shown_verdict(self) -> str:
        """Return the verdict, and say if runs of other code might have told what these cannot."""
        is_mixed = self.verdict == UNCLEAR and self.evidence is not None and self.evidence.others
        return f"{self.verdict} (mixed code)" if is_mixed else self.verdict

    @property
    def counted_as(self) -> str:
        """Return the verdict as the sums count it.

        Fewer units than a verdict needs count as not run.
        """
        sampled = self.evidence is not None and isinstance(self.evidence.found, Effect)
        few = self.verdict == UNCLEAR and sampled and self.units < LEAST_UNITS
        return NOT_RUN if few else self.verdict


def judge(claim: Claim, tables: Tables) -> Judged:
    """Return the verdict on a claim, with what a verdict takes if it counts as not run."""
    one = decided(claim, tables)
    if one.counted_as != NOT_RUN or claim.cost is None:
        return one
    try:
        minutes = LEAST_UNITS * claim.cost(tables)
    except Missing:  # no table has the rate
        return one
    return replace(one, cost=f"{minutes:,.0f} minutes of an H200 for {LEAST_UNITS} units")


def decided(claim: Claim, tables: Tables) -> Judged:
    """Return the verdict of the claim's rule on what its judge finds in the tables."""
    try:
        evidence = claim.judge(tables)
    except Missing as missing:
        return Judged(claim, NOT_RUN, why=str(missing))
    except NotPossible as reason:
        return Judged(claim, IMPOSSIBLE, why=str(reason))
    except Mixed as reason:
        return Judged(claim, UNCLEAR, why=str(reason))
    return Judged(claim, evidence.verdict or claim.rule.verdict(evidence.found, claim.rate), evidence)
