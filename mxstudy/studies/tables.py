"""Tables of words and numbers that are cells already, on the terminal and as Markdown."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

LEFT = ("task", "form", "arm")  # columns of words


def show(title: str, columns: tuple[str, ...], cells: list[tuple[str, ...]], notes: list[str]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "arm", overflow="fold")
    for row in cells:
        table.add_row(*row)
    Console(highlight=False).print(table)
    for note in notes:
        print(note, flush=True)


def markdown(title: str, columns: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple(":---" if name in LEFT else "---:" for name in columns), *cells]
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])
