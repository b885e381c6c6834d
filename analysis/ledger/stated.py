"""Make the rows of sweeps whose comparisons were stated before their runs: a row for each comparison."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.ledger.claim import PRETRAINING, Claim, Judge
from analysis.ledger.costs import llama_23m
from analysis.ledger.training import Dies, Difference
from analysis.stated import Comparison, Question, tokens_of


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
            arms="; ".join(one.pairs),
            judge=judge_of(of, one),
            rule=one.rule,
            needs=len(of.seeds),
            comparisons=together,
            page=page,
            cost=llama_23m(tokens_of(of, one.pairs)),
        )
        for one in comparisons
    )


def judge_of(of: Question, one: Comparison) -> Judge:
    arm, baseline, *beside = (of.arms[name] for name in one.pairs)
    tables = (one.table or of.sweep,)
    if one.divergences:
        return Dies(tables, arm, baseline)
    return Difference(tables, arm, baseline, beside=beside)
