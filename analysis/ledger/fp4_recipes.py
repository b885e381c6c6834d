"""What the published FP4 recipes claim against each other: a row for each comparison of a contradiction."""

from __future__ import annotations

from analysis.fp4.contradictions import CONTRADICTIONS
from analysis.ledger.claim import PRETRAINING, Claim
from analysis.ledger.training import Difference, in_lot
from analysis.stated import PAIRS, size

CLAIMS = tuple(
    Claim(
        id=one.id,
        where=one.by,
        says=one.says,
        kind=PRETRAINING,
        there="30M to 12B, 3B to 10T tokens",
        arms=f"{one.arm}; {one.baseline}",
        judge=in_lot(*size(of), Difference((of.sweep,), of.arms[one.arm], of.arms[one.baseline])),
        rule=one.rule,
        needs=PAIRS,
    )
    for of in CONTRADICTIONS
    for one in of.comparisons
)
