"""Format numbers as cells of a table, and cells as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable


def plus_minus(value: float, stderr: float, form: str) -> str:
    """Return '50.0 +- 2.5', or '50.0' if the standard error is NaN, as for a single question, document or subject."""
    return f"{value:{form}}" + ("" if math.isnan(stderr) else f" +- {stderr:{form}}")


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]], left: Collection[str] = ()) -> str:
    """Return a Markdown table; columns are right-aligned, except those in `left`."""
    names = list(columns)
    rules = "|".join("---" if name in left else "---:" for name in names)
    return "\n".join([line(names), f"|{rules}|", *map(line, rows)])


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
