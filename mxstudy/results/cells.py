"""Numbers as the text of a table's cell, and cells as a table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable


def plus_minus(value: float, stderr: float, form: str) -> str:
    """'50.0 +- 2.5', or '50.0' alone where there is no standard error: of a single question, document or subject's."""
    return f"{value:{form}}" + ("" if math.isnan(stderr) else f" +- {stderr:{form}}")


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]], left: Collection[str] = ()) -> str:
    """A table of these columns, right-aligned but for those of words, which are `left`."""
    names = list(columns)
    rules = "|".join("---" if name in left else "---:" for name in names)
    return "\n".join([line(names), f"|{rules}|", *map(line, rows)])


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
