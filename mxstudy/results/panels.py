"""Draw arms in panels: losses above their differences, an axis in tokens, and a legend outside of the data."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from mxstudy.results.curves import Curves, band, draw_arm

UNITS = {1e12: "T", 1e9: "B", 1e6: "M", 1e3: "K"}
SHARED = "0.4"  # the grey of a legend's entry for artists of several colours
PAINTS = ("get_color", "get_facecolor")
BESIDE = 16  # letters of a baseline's name that fit beside the lower panel
ENTRY, LETTER, LINE = 0.5, 0.055, 0.15  # inches of a legend's entry without its text, of a letter, and of a line
POWER = r"$\mathdefault{"  # begins the numbers of logarithmic axes, which matplotlib sets as formulas


def draw_arms(
    figure: Any,
    arms: Iterable[Curves],
    raw: Mapping[str, Curves] | None = None,
    convert: Callable[[pd.DataFrame], pd.DataFrame] = lambda values: values,
    **style: Any,
) -> list[Any]:
    """Draw curves by tokens, and below them their differences from the arms that they are compared with, if any.

    `raw`: by arm, the curves to draw behind an arm of one run. `convert` maps the values to what the upper panel shows,
    while differences are of the values themselves. Returns the one or two panels.
    """
    known = {own.arm: own for own in arms}
    others = {arm: own.partner for arm, own in known.items() if own.partner in known and own.partner != arm}
    apart = {arm: less for arm, partner in others.items() if (less := known[arm].less(known[partner])).shape[1]}
    ratios = {"height_ratios": (3, 2)} if apart else {}
    top, *bottom = panels = list(figure.subplots(1 + bool(apart), sharex=True, squeeze=False, **ratios)[:, 0])
    for arm, own in known.items():
        if raw and own.alive.shape[1] == 1:
            top.plot(raw[arm].alive, color=own.color, linewidth=0.6, alpha=0.25, label="not smoothed")
        draw_arm(top, own.shown(convert), **style)
    for axes in bottom:
        zero = axes.axhline(0, color="black", linewidth=0.6)
        for arm, less in apart.items():
            band(axes, less, known[arm].color, **style)
        partners = {others[arm] for arm in apart}
        name = partners.pop() if len(partners) == 1 else "the baseline"
        if len(name) <= BESIDE:
            axes.set_ylabel(f"minus that of\n{name}, nats", parse_math=False)
        else:  # the legend has room for a longer name
            axes.set_ylabel("minus the\nbaseline, nats")
            zero.set_label(f"baseline: {name}")
    in_tokens(panels[-1])
    return panels


def in_tokens(*panels: Any, label: str = "training tokens") -> None:
    """Make the horizontal axis of each panel one of training tokens, in K, M, B and T."""
    for axes in panels:
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(lambda count, _: tokens_text(count))


def tokens_text(count: float) -> str:
    """Return a number of tokens as '0', '250K' or '1.5B'."""
    size, unit = next((pair for pair in UNITS.items() if abs(count) >= pair[0]), (1.0, ""))
    return f"{count / size:g}{unit}"


def legend(figure: Any, *others: Any, title: str | None = None) -> None:
    """Write a legend above all panels, with `others`: each label once, in as many columns as fit, and none a formula.

    A label that artists of several colours share is grey, and comes last. One that is wider than the figure has several
    lines, and the figure grows where the legend would take more than half of it.
    """
    named = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    found: dict[str, list[Any]] = {}
    for artist, label in [*named, *((artist, artist.get_label()) for artist in others)]:
        found.setdefault(label, []).append(artist)
    if not found:
        return
    labels = sorted(found, key=lambda label: len(colors_in(found[label])) > 1)
    shown = [textwrap.fill(label, int((figure.get_figwidth() - ENTRY) / LETTER)) for label in labels]
    room = int(figure.get_figwidth() / (ENTRY + LETTER * max(map(len, labels))))
    columns = max(1, min(len(labels), room))
    lines = sum(label.count("\n") + 1 for label in shown) / columns
    figure.set_figheight(max(figure.get_figheight(), 2 * LINE * lines))
    drawn = figure.legend(
        [found[label][0] for label in labels],
        shown,
        loc="outside upper center",
        title=title,
        ncols=columns,
        fontsize=7,
        frameon=False,
    )
    for text in (drawn.get_title(), *drawn.get_texts()):
        text.set_parse_math(False)
    for label, handle in zip(labels, drawn.legend_handles, strict=True):
        if len(colors_in(found[label])) > 1:
            handle.set(color=SHARED, alpha=found[label][0].get_alpha())


def colors_in(artists: Iterable[Any]) -> set[str]:
    """Return the colours of lines and areas, as text."""
    painted = [getattr(artist, name)() for artist in artists for name in PAINTS if hasattr(artist, name)]
    return set(map(str, painted))


def save_figure(figure: Any, to: Any, **options: Any) -> None:
    """Write a figure. No text is a formula but the numbers of logarithmic axes, so that `$` in a name stays as it is.

    A line of a single point would show nothing, so it gets a dot, as after one measurement of a probe.

    `to` and `options` are those of matplotlib's savefig.
    """
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    for line in figure.findobj(Line2D):
        if line.get_marker() == "None" and np.isfinite(line.get_xydata()).all(axis=1).sum() == 1:
            line.set_marker(".")
    for text in figure.findobj(Text):
        if text.get_text() and not text.get_text().startswith(POWER):  # until they are drawn, numbers have no text
            text.set_parse_math(False)
    figure.savefig(to, **options)
