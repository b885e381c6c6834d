"""What the MXFP8 recipe claims, judged at 23M by rules that were stated before: a row a comparison."""

from __future__ import annotations

from analysis.ledger.stated import rows
from analysis.recipe.arms_23m import RECIPE, RECIPE_AGAIN, TOGETHER, TOGETHER_AGAIN

SCALE = "843M to 8B, 300B to 15T tokens"
FORMS = ((RECIPE, TOGETHER), (RECIPE_AGAIN, TOGETHER_AGAIN))
CLAIMS = tuple(
    row for of, together in FORMS for claims in together for row in rows(of, claims, SCALE, len(claims), RECIPE.sweep)
)
