"""List what the published FP4 recipes claim against each other: a row for each comparison of a contradiction."""

from __future__ import annotations

from functools import partial

from analysis.fp4.contradictions import MX_GRADIENTS, NV_PART
from analysis.fp4.questions import QUESTIONS
from analysis.ledger.claim import PRETRAINING, Claim, Evidence
from analysis.ledger.rules import lower
from analysis.ledger.stated import rows
from analysis.ledger.tables import Missing, Tables

SCALE, PAGE = "30M to 12B, 3B to 10T tokens", "fp4_recipes"


def not_computed(what: str, tables: Tables) -> Evidence:
    raise Missing(f"no code here computes {what}")


NOT_COMPUTED = (  # id, who claims it, what it says, what no code here computes, rule
    (
        "fp4-range-eden",
        "arXiv 2601.22813",
        "gradients by EDEN are better than by stochastic rounding in 16/17 of the range",
        "EDEN",
        lower(*NV_PART),
    ),
    (
        "fp4-scales-oscireset",
        "ALTO",
        "MXFP4 with OsciReset is better than NVFP4",
        "OsciReset",
        lower(*MX_GRADIENTS),
    ),
)
CLAIMS = (
    *(row for of in QUESTIONS for row in rows(of, of.comparisons, SCALE, page=PAGE)),
    *(
        Claim(
            id=name,
            where=by,
            says=says,
            kind=PRETRAINING,
            there=SCALE,
            judge=partial(not_computed, what),
            rule=rule,
            page=PAGE,
        )
        for name, by, says, what, rule in NOT_COMPUTED
    ),
)
