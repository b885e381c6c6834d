"""List what the published FP4 recipes claim against each other: a row for each comparison of a contradiction."""

from __future__ import annotations

from analysis.fp4.contradictions import CONTRADICTIONS
from analysis.ledger.stated import rows

SCALE, PAGE = "30M to 12B, 3B to 10T tokens", "fp4_recipes"
CLAIMS = tuple(row for of in CONTRADICTIONS for row in rows(of, of.comparisons, SCALE, page=PAGE))
