"""What the MXFP8 recipe claims, judged at 23M by rules that were stated before: a row a comparison."""

from __future__ import annotations

from analysis.ledger.claim import PRETRAINING, Claim
from analysis.ledger.training import Difference, in_lot
from analysis.recipe.arms_23m import ARMS, RECIPE, TOGETHER
from analysis.stated import PAIRS, size

CLAIMS = tuple(
    Claim(
        id=one.id,
        where=one.by,
        says=one.says,
        kind=PRETRAINING,
        there="843M to 8B, 300B to 15T tokens",
        arms=f"{one.arm}; {one.baseline}",
        judge=in_lot(*size(RECIPE), Difference((RECIPE.sweep,), ARMS[one.arm], ARMS[one.baseline])),
        rule=one.rule,
        needs=PAIRS,
        comparisons=len(claims),
        page=RECIPE.sweep,
    )
    for claims in TOGETHER
    for one in claims
)
