"""Make the rows of sweeps whose comparisons were stated before their runs: a row for each comparison."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.ledger.claim import PRETRAINING, Claim
from analysis.ledger.training import Difference, in_lot
from analysis.stated import Comparison, Question, size


def rows(
    of: Question, comparisons: Iterable[Comparison], there: str, together: int = 1, page: str = ""
) -> tuple[Claim, ...]:
    """Return a claim for each of these comparisons of a question.

    `together` is the number of comparisons for which intervals are corrected.
    """
    return tuple(
        Claim(
            id=one.id,
            where=one.by,
            says=one.says,
            kind=PRETRAINING,
            there=there,
            arms=f"{one.arm}; {one.baseline}",
            judge=in_lot(*size(of), Difference((of.sweep,), of.arms[one.arm], of.arms[one.baseline])),
            rule=one.rule,
            needs=len(of.seeds),
            comparisons=together,
            page=page,
        )
        for one in comparisons
    )
