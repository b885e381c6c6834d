"""List the MXFP8 recipe's claims that are judged at 23M by rules stated before the runs: a row for each comparison."""

from __future__ import annotations

from analysis.ledger.stated import rows
from analysis.recipe.arms_23m import RECIPE, RECIPE_AGAIN, TOGETHER, TOGETHER_AGAIN

SCALE = "843M to 8B, 300B to 15T tokens"
FORMS = ((RECIPE, TOGETHER), (RECIPE_AGAIN, TOGETHER_AGAIN))
CLAIMS = tuple(
    row for of, together in FORMS for claims in together for row in rows(of, claims, SCALE, len(claims), RECIPE.sweep)
)
