"""List all claims by document.

The list only grows: tests/claim_ids.txt has the id of every row that was ever here.
"""

from __future__ import annotations

from analysis.ledger import (
    fp4_recipes,
    instability,
    instability_formulas,
    instability_language,
    instability_runs,
    mxnorm,
    mxnorm_training,
    recipe,
    recipe_23m,
    transformer_engine,
)
from analysis.ledger.claim import PRETRAINING, Claim, Judged, judge
from analysis.ledger.tables import Tables

DOCUMENTS: dict[str, tuple[Claim, ...]] = {
    "MXNorm": (*mxnorm.CLAIMS, *mxnorm_training.CLAIMS),
    "Instability paper": (
        *instability_formulas.CLAIMS,
        *instability.CLAIMS,
        *instability_runs.CLAIMS,
        *instability_language.CLAIMS,
    ),
    "MXFP8 recipe": (*recipe.CLAIMS, *recipe_23m.CLAIMS),
    "Transformer Engine": transformer_engine.CLAIMS,
    "FP4 recipes": fp4_recipes.CLAIMS,
}


def judged(tables: Tables) -> dict[str, list[Judged]]:
    """Return every claim with its verdict, by document."""
    return {document: [judge(claim, tables) for claim in claims] for document, claims in DOCUMENTS.items()}


def judged_by_runs(tables: Tables) -> list[tuple[str, Judged]]:
    """Return the claims about trained models as the given runs judge them, each with its document."""
    own = [(name, claim) for name, claims in DOCUMENTS.items() for claim in claims if claim.kind == PRETRAINING]
    return [(name, judge(claim, tables)) for name, claim in own]
