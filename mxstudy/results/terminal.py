"""Show tables whose cells are already formatted, on the terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxstudy import results

LEFT = ("task", "form", "arm", "MLflow run")  # columns of words


def show(title: str, columns: tuple[str, ...], cells: list[tuple[str, ...]], notes: list[str]) -> None:
    Console(highlight=False).print(grid(title, columns, cells))
    for note in notes:
        print(note, flush=True)


def grid(
    title: str | None, columns: Iterable[str], cells: Iterable[Iterable[str | Text]] = (), left: Collection[str] = LEFT
) -> Table:
    """Return a rich table; on a narrow terminal, names of arms wrap and other cells are cut off with an ellipsis."""
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
