"""Numbers as the text of a table's cell."""

from __future__ import annotations

import math


def plus_minus(value: float, stderr: float, form: str) -> str:
    """'50.0 +- 2.5', or '50.0' alone where there is no standard error: of a single question, document or subject's."""
    return f"{value:{form}}" + ("" if math.isnan(stderr) else f" +- {stderr:{form}}")
