"""Panels of arms have an axis in tokens, and a legend that names everything once."""

from __future__ import annotations

import re
from io import BytesIO, StringIO
from xml.sax.saxutils import escape

import numpy as np
import pandas as pd
from each import each
from figure_rules import broken
from matplotlib import rc_context
from matplotlib.figure import Figure

from mxstudy.results import draw_arms, legend, save_figure
from mxstudy.results.curves import Curves
from mxstudy.results.panels import SHARED, tokens_text


@each(
    ("count", "text"),
    [(0, "0"), (500, "500"), (2_500, "2.5K"), (105e6, "105M"), (1.5e9, "1.5B"), (3e12, "3T"), (-2e6, "-2M")],
)
def test_tokens_are_in_thousands_millions_billions_and_trillions(count: float, text: str) -> None:
    assert tokens_text(count) == text


def test_a_legend_names_each_label_of_all_panels_once_outside_of_the_data() -> None:
    figure = Figure(figsize=(3.25, 4), layout="constrained")
    for axes in figure.subplots(2):
        for color in ("red", "blue"):
            axes.fill_between([0, 1], 0, 2, color=color, alpha=0.2, label="range")
            axes.plot([0, 1], color=color, label=color)
    legend(figure)
    (drawn,) = figure.legends
    assert [text.get_text() for text in drawn.get_texts()] == ["red", "blue", "range"]  # what both have comes last
    lines, band = drawn.legend_handles[:2], drawn.legend_handles[2]
    assert [line.get_color() for line in lines] == ["red", "blue"]
    assert band.get_facecolor() == (float(SHARED), float(SHARED), float(SHARED), 0.2)
    assert broken(figure) == []


def test_long_names_of_many_arms_leave_room_for_the_panels() -> None:
    figure = Figure(figsize=(3.25, 4), layout="constrained")
    panels = figure.subplots(2)
    for number in range(30):
        panels[0].plot(
            [0, number], label=f"nvfp4 rmsnorm forward_x.outer_scale=bound,wgrad_x.outer_scale=bound {number}"
        )
    legend(figure)
    figure.draw_without_rendering()
    assert min(axes.get_position().height for axes in panels) > 0.1
    assert broken(figure) == []


@each(
    ("baseline", "beside"),
    [
        ("mxfp8 rmsnorm", "minus that of\nmxfp8 rmsnorm, nats"),
        ("nvfp4 rmsnorm_folded forward_x.outer_scale=bound,pad_blocks=true", "minus the\nbaseline, nats"),
    ],
)
def test_a_long_name_of_the_baseline_is_in_the_legend_and_not_beside_the_lower_panel(
    baseline: str, beside: str
) -> None:
    losses = pd.DataFrame({"seed 0": [3.0, 2.0]}, index=[1000, 2000])
    arms = [Curves(name, "red", baseline, losses, losses.iloc[:, :0]) for name in (baseline, f"{baseline} p=4")]
    with rc_context({"font.size": 8}):
        figure = Figure(figsize=(3.25, 4.2), layout="constrained")
        _, lower = draw_arms(figure, arms)
        legend(figure)
        figure.draw_without_rendering()
    label, panel = lower.yaxis.label.get_window_extent(), lower.get_window_extent()
    assert lower.get_ylabel() == beside
    assert panel.y0 < label.y0 < label.y1 < panel.y1
    assert broken(figure) == []


def test_a_figure_without_a_label_has_no_legend() -> None:
    figure = Figure(layout="constrained")
    figure.subplots().plot([0, 1])
    legend(figure)
    assert figure.legends == []


@each("name", ["price_$_in_$", r"a$\q{$<b>x", r"a\$b$2^3$"])
def test_a_dollar_in_a_name_is_a_dollar_in_a_figure_and_powers_of_ten_are_still_formulas(name: str) -> None:
    figure = Figure(figsize=(3.25, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 1e6], [0, 1], label=name)
    axes.set(title=name, ylabel=name, xscale="log")
    axes.set_yticks([0, 1], [name, name])
    legend(figure)
    for _ in ("png", "pdf"):  # each is written from the same figure
        file = StringIO()
        with rc_context({"svg.fonttype": "none"}):
            save_figure(figure, file, format="svg")
        assert file.getvalue().count(f">{escape(name)}</text>") == 5
        assert "mathdefault" not in re.sub("<!--.*?-->", "", file.getvalue())


@each("name", ["price_$_in_$", r"a$\q{$<b>x"])
def test_a_dollar_in_the_name_of_an_arm_is_a_dollar_in_a_figure_that_is_not_saved(name: str) -> None:
    losses = pd.DataFrame({"seed 0": [3.0, 2.0]}, index=[1000, 2000])
    figure = Figure(layout="constrained")
    _, lower = draw_arms(figure, [Curves(arm, "red", name, losses, losses.iloc[:, :0]) for arm in (name, "other")])
    legend(figure, title=name)
    figure.draw_without_rendering()
    (drawn,) = figure.legends
    assert name in lower.get_ylabel()
    assert not any(text.get_parse_math() for text in (lower.yaxis.label, drawn.get_title(), *drawn.get_texts()))


def test_a_line_of_a_single_point_is_seen() -> None:
    """A figure of a probe that had measured once was empty."""
    figure = Figure()
    axes = figure.subplots()
    one, two = (axes.plot(range(count), [3.0, np.nan, 4.0][:count])[0] for count in (2, 3))
    save_figure(figure, BytesIO())
    assert (one.get_marker(), two.get_marker()) == (".", "None")
