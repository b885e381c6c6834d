"""Tables of words and numbers that are cells already, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mxstudy import results

LEFT = ("task", "form", "arm", "MLflow run")  # columns of words


def show(title: str, columns: tuple[str, ...], cells: list[tuple[str, ...]], notes: list[str]) -> None:
    Console(highlight=False).print(grid(title, columns, cells))
    for note in notes:
        print(note, flush=True)


def grid(
    title: str | None, columns: Iterable[str], cells: Iterable[Iterable[str]] = (), left: Collection[str] = LEFT
) -> Table:
    """On a narrow terminal names of arms go over several lines; what is cut off elsewhere ends in an ellipsis."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for name in columns:
        fits: dict[str, Any] = {"overflow": "fold"} if name == "arm" else {"no_wrap": True}
        table.add_column(name, justify="left" if name in left else "right", **fits)
    for row in cells:
        table.add_row(*row)
    return table


def markdown(title: str, columns: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    return f"**{title}**\n\n{results.markdown(columns, cells, LEFT)}"
