"""A claim of a document, and what the tables say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.ledger.rules import ALPHA, UNCLEAR, Rule
from analysis.ledger.tables import Missing, Tables
from analysis.statistics import LEAST_UNITS, Effect, Found
from analysis.units import Arm, chosen, differing, of_one_code, shared_units

NOT_RUN, IMPOSSIBLE = "not run", "not possible here"
ARITHMETIC, KERNEL, STUDENTS, PRETRAINING, EVALUATION = KINDS = (
    "arithmetic",
    "kernel",
    "students",
    "pre-training",
    "evaluation",
)


class NotPossible(Exception):
    """Raised by a judge: the message names the hardware, or the GPU hours at the measured rate."""


class Mixed(Exception):
    """Raised by a judge: an arm holds several settings, or the arms no one code."""


Judge = Callable[[Tables], "Evidence"]


def in_one_code(
    runs: pd.DataFrame, arms: Sequence[Arm], unit: Sequence[str], over: Sequence[str] = ()
) -> tuple[pd.DataFrame, int]:
    """Return the runs of one code, and how many units it lacks that others have.

    Raises Missing if an arm has no runs, and Mixed if one holds several settings.
    """
    if any(not chosen(runs, arm).any() for arm in arms):
        raise Missing("no runs of an arm in these tables")
    own = of_one_code(runs, arms, unit)
    if not len(own):
        raise Mixed("no seed has all arms in one code")
    for arm in arms:
        if mixed := differing(own[chosen(own, arm)], over):
            raise Mixed(f"{mixed[0].removeprefix('config.')} differs within an arm")
    return own, others(runs, own, arms, unit)


def others(runs: pd.DataFrame, own: pd.DataFrame, arms: Sequence[Arm], unit: Sequence[str]) -> int:
    """Return how many units with all arms are in `runs`, of other code, and not in `own`."""
    return len(shared_units(runs, arms, unit) - shared_units(own, arms, unit))


@dataclass(frozen=True)
class Evidence:
    """What a judge found: one effect per comparison, of which `unit`s, and what is to be said beside the numbers.

    `verdict`: only where a rule that was stated before the runs has decided already, or nothing can. `here`: the scale.
    `others`: units that are left out because they are of other code.
    """

    found: Sequence[Found]
    unit: str
    note: str = ""
    verdict: str = ""
    here: str = ""
    others: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Claim:
    """A claim. `id`: its name for ever. `where`: section, figure or equation. `says`: the claim, in our words.

    `there`, `here`: the scale at which the document claims it, and that at which it is judged, unless the judge reads
    it from the runs. `arms`: what is compared. `needs`: the units that the rule needs. `comparisons`: by how many the
    intervals are corrected, where that was stated before the runs. `page`: where its runs are described.
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
    comparisons: int | None = None
    page: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict. `rates`: the error rate of each comparison's test. `why`: in place of effects."""

    claim: Claim
    verdict: str
    evidence: Evidence | None = None
    rates: Sequence[float] = ()
    why: str = ""

    @property
    def units(self) -> int:
        return min((one.count for one in self.evidence.found), default=0) if self.evidence else 0

    @property
    def shown_verdict(self) -> str:
        """Return the verdict; where runs of other code might have told what these cannot, it says so."""
        is_mixed = self.verdict == UNCLEAR and self.evidence is not None and self.evidence.others
        return f"{self.verdict} (mixed code)" if is_mixed else self.verdict

    @property
    def counted_as(self) -> str:
        """Return the verdict as it is counted in the sums: fewer units than a verdict needs are as good as not run."""
        sampled = self.evidence is not None and any(isinstance(one, Effect) for one in self.evidence.found)
        few = self.verdict == UNCLEAR and sampled and self.units < LEAST_UNITS
        return NOT_RUN if few else self.verdict


def judge(claim: Claim, tables: Tables) -> Judged:
    """Return the verdict of the claim's rule on what its judge finds in the tables."""
    try:
        evidence = claim.judge(tables)
    except Missing as missing:
        return Judged(claim, NOT_RUN, why=str(missing))
    except NotPossible as reason:
        return Judged(claim, IMPOSSIBLE, why=str(reason))
    except Mixed as reason:
        return Judged(claim, UNCLEAR, why=str(reason))
    if evidence.verdict:
        return Judged(claim, evidence.verdict, evidence, [ALPHA / (claim.comparisons or 1)] * len(evidence.found))
    verdict, rates = claim.rule.verdict(evidence.found, claim.comparisons)
    return Judged(claim, verdict, evidence, rates)
