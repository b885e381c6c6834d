"""What the MXFP8 recipe claims, judged at 23M by rules that were stated before: a row a comparison."""

from __future__ import annotations

from analysis.ledger.stated import rows
from analysis.recipe.arms_23m import RECIPE, TOGETHER

SCALE = "843M to 8B, 300B to 15T tokens"
CLAIMS = tuple(row for claims in TOGETHER for row in rows(RECIPE, claims, SCALE, len(claims), RECIPE.sweep))
