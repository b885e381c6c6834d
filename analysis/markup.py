"""Make elements of an HTML page. Plain text is always escaped, whatever it looks like."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence


class Html(str):
    """Text that is HTML already. Only `element` makes it of other text."""

    def __add__(self, other: str) -> Html:
        return Html(str(self) + escaped(other))


def escaped(content: object) -> str:
    """Return the content as HTML. Text that is not `Html` is escaped."""
    return str(content) if isinstance(content, Html) else html.escape(str(content))


def element(tag: str, *content: object, **attributes: str) -> Html:
    """Return an element with that content and attributes. `kind` is the attribute class."""
    named = {"class" if name == "kind" else name: value for name, value in attributes.items()}
    given = "".join(f' {name}="{html.escape(value)}"' for name, value in named.items())
    return Html(f"<{tag}{given}>{''.join(map(escaped, content))}</{tag}>")


class Number(str):
    """Text that is aligned to the right."""


Rows = Sequence[Sequence[object]]


def table(columns: Sequence[str], rows: Rows | Mapping[str, Rows]) -> Html:
    """Return a table. Rows that are grouped by name have the name above them."""
    groups = rows.items() if isinstance(rows, Mapping) else [("", rows)]
    body = []
    for name, own in groups:
        body += [element("tr", element("th", name, kind="group", colspan=str(len(columns))))] if name else []
        body += [element("tr", *map(cell, row)) for row in own]
    return element("table", element("tr", *(element("th", column) for column in columns)), *body)


def cell(value: object) -> Html:
    return element("td", value, kind="number") if isinstance(value, Number) else element("td", value)


def folded(summary: str, content: Html) -> Html:
    """Return an element that shows its content when a reader opens it."""
    return element("details", element("summary", summary), content)
