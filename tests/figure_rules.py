"""Check the rules that hold for every figure, whatever it shows."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from analysis.style import ONE_COLUMN, TWO_COLUMNS

NEAR = 1.0  # pixels by which boxes may touch


def check_saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Check figures in place of saving them, write empty files, and return the rules that each breaks, by its name."""
    found: dict[str, list[str]] = {}

    def save(figure: Figure, path: Path) -> None:
        path.touch()
        if path.stem not in found:
            found[path.stem] = broken(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    return found


def broken(figure: Figure) -> list[str]:
    """Draw a figure once, and return the rules that it breaks, in words."""
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    legends = [*figure.legends, *(axes.legend_ for axes in panels if axes.legend_)]
    return [
        *(["is as wide as no column"] if figure.get_figwidth() not in (ONE_COLUMN, TWO_COLUMNS) else []),
        *(f"a legend lies over {axes.get_title()!r}" for axes in panels if any(over(axes, one) for one in legends)),
        *(
            f"{label!r} is in no legend"
            for label in sorted(labels_of(panels))
            if unbroken(label) not in named_in(legends)
        ),
        *(f"{text.get_text()!r} is cut off" for text in texts_of(figure) if is_cut(text, figure)),
        *(f"labels of {axes.get_title()!r} overlap" for axes in panels if overlap(tick_labels(axes))),
        *(["names of axes overlap"] if overlap([axes.xaxis.label for axes in panels]) else []),
    ]


def over(axes: Axes, legend: Legend) -> bool:
    box = Bbox.intersection(axes.get_window_extent(), legend.get_window_extent())
    return box is not None and min(box.width, box.height) > NEAR


def labels_of(panels: list[Axes]) -> set[str]:
    """Return the labels of all that is drawn in these panels."""
    return {label for axes in panels for label in axes.get_legend_handles_labels()[1]}


def named_in(legends: list[Legend]) -> set[str]:
    return {unbroken(text.get_text()) for legend in legends for text in legend.get_texts()}


def unbroken(text: str) -> str:
    """Return a text without spaces and line breaks: a long name in a legend has several lines."""
    return "".join(text.split())


def texts_of(figure: Figure) -> list[Text]:
    found = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    hidden = {id(text) for axes in figure.axes if not axes.get_visible() for text in axes.findobj(Text)}
    ticks = {id(text) for axes in figure.axes for which in (axes.xaxis, axes.yaxis) for text in which.findobj(Text)}
    shown = {id(text) for axes in figure.axes for text in (*tick_labels(axes), *tick_labels(axes, "y"))}
    return [text for text in found if text.get_text() and id(text) not in hidden and id(text) not in ticks - shown]


def tick_labels(axes: Axes, which: str = "x") -> list[Text]:
    """Return the labels of an axis that are within its limits and not empty."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_visible()]
    return [tick.label1 for tick in ticks if tick.label1.get_text()]


def is_cut(text: Text, figure: Figure) -> bool:
    box, paper = text.get_window_extent(), figure.bbox
    return min(box.x0, box.y0, paper.x1 - box.x1, paper.y1 - box.y1) < -NEAR


def overlap(texts: list[Text]) -> bool:
    boxes = [text.get_window_extent() for text in texts if text.get_text() and text.get_rotation() in (0, 90)]
    return any(
        (both := Bbox.intersection(*pair)) is not None and min(both.width, both.height) > NEAR
        for pair in combinations(boxes, 2)
    )
