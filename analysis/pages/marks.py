"""Find the parts of a page that are made from tables, and replace their text.

A part stands between `<!-- from: NAME -->` and `<!-- end -->`. It is a table on lines of its own, or a number in a
sentence.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pandas as pd

from analysis.ledger.tables import RESULTS
from mxstudy import results

PART = re.compile(r"(?P<begin><!-- from: (?P<name>[^>]*?) -->)(?P<made>.*?)(?P<end><!-- end -->)", re.S)
MARK = re.compile(r"<!-- (?:from: [^>]*?|end) -->")

Parts = Mapping[str, Callable[[], str]]


def rewritten(page: str, parts: Parts) -> str:
    """Return the page with each part made anew. Raises ValueError for a mark that is alone or has an unknown name."""
    if len(MARK.findall(page)) != 2 * len(PART.findall(page)):
        raise ValueError("each <!-- from: NAME --> needs one <!-- end -->")
    return PART.sub(lambda match: match["begin"] + made(match["name"], parts) + match["end"], page)


def made(name: str, parts: Parts) -> str:
    if name not in parts:
        near = difflib.get_close_matches(name, parts, n=5, cutoff=0)
        raise ValueError(f"from: {name}: no such part of this page; choose from {', '.join(near)}")
    text = parts[name]()
    return f"\n{text.strip()}\n" if "\n" in text else text


def names(page: str) -> list[str]:
    """Return the names of all parts of a page."""
    return [match["name"] for match in PART.finditer(page)]


@cache
def rows_of(kind: str, *prefixes: str) -> pd.DataFrame:
    """Return the rows of that kind from the tables in results/ that have one of these prefixes."""
    return results.load([RESULTS / prefix for prefix in prefixes], kind)


@cache
def benchmark(name: str) -> Any:
    """Return what a benchmark wrote into results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = benchmark(name)["rows"]
    return found


def row(name: str, **wanted: object) -> dict[str, Any]:
    """Return the one row of a benchmark that has these values."""
    (found,) = (each for each in rows(name) if all(each.get(key) == wanted[key] for key in wanted))
    return dict(found)


def commit_of(name: str) -> str:
    """Return the commit of a benchmark's run as a page shows it."""
    return f"`{benchmark(name)['provenance']['commit'][:7]}`"


def frame(name: str) -> pd.DataFrame:
    """Return the rows of a benchmark."""
    return pd.DataFrame(rows(name))


def least_and_most(values: pd.Series, form: str) -> str:
    """Return the least and the most of the values: '0.96 to 1.00'."""
    return f"{values.min():{form}} to {values.max():{form}}"


def one_or_range(values: pd.Series, form: str) -> str:
    """Return the least and the most of the values, or one number if both look the same: '31 to 33', or '0.14'."""
    return " to ".join(dict.fromkeys(least_and_most(values, form).split(" to ")))


def share(count: float, runs: int, still_open: int = 0) -> str:
    """Return a count of runs: '20 of 32', or '20 of 32, 1 open'."""
    return f"{count:.0f} of {runs}" + (f", {still_open} open" if still_open else "")


def share_of(which: pd.Series) -> str:
    """Return how many are true: '20 of 32'."""
    return share(which.sum(), len(which))
