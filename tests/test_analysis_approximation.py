"""Figures of the approximation study are drawn from its tables, and show what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from each import slow_but
from test_analysis import check_saved_twice, drawn
from tracked import make_folder, training_row, write_rows

from analysis.mxnorm import fig02_approximation, theorem1_bounds
from analysis.recipe import cast_quality, formats_table
from mxstudy.config import Approximation
from mxstudy.results import load_table, table_path, write_table
from mxstudy.studies.approximation import run as approximation
from mxstudy.studies.approximation.tables import TABLES
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.provenance import provenance

FIGURES = [fig02_approximation, theorem1_bounds, cast_quality]


def measured(runs: Path, name: str, **values: object) -> RunFolder:
    """Write a run of the approximation study as it leaves its tables."""
    config = Approximation(experiment="approximation", draws=2, rows=8, hidden_size=256, elements=1024, **values)
    origin = provenance() | {"label": f"seed={config.seed}", "choices": {}}
    folder = RunFolder.create(runs / "approximation" / name, config, name * 5, origin)
    table_path(folder, "quality").parent.mkdir()
    for table, measure in TABLES.items():
        write_table(pd.DataFrame(measure(config)), table_path(folder, table), {})
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return measured(tmp_path_factory.mktemp("study"), "a" * 12, max_blocks=4)


@pytest.mark.integration
@pytest.mark.parametrize("script", slow_but(FIGURES[:1], FIGURES))
def test_figures_are_saved_twice(script, study: RunFolder, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    check_saved_twice(script, study.path, capsys)


def test_the_study_names_the_figures_that_there_are() -> None:
    here = [script.__name__.removeprefix("analysis.") for script in (*FIGURES, formats_table)]
    assert list(approximation.FIGURES) == here


@pytest.mark.integration
def test_figure_2_shows_the_counts_and_r_squared(study: RunFolder, monkeypatch) -> None:
    scales, elements, fidelity = drawn(fig02_approximation, monkeypatch, "--runs", str(study.path)).axes
    rows = load_table([study], "distributions")
    exponents = rows[rows["quantity"] == "scale exponent"]
    bars = [
        {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in group} for group in scales.containers
    ]
    for std, group in zip((0.1, 1.0, 10.0), bars, strict=False):
        one = exponents[(exponents["norm"] == "no norm") & (exponents["std"] == std)]
        assert group == pytest.approx(dict(zip(one["value"], one["count"] / 64, strict=True)))
    for norm, group in zip(("RMSNorm", "MXNorm p=1", "MXNorm p=2"), bars[3:], strict=True):
        counts = exponents[exponents["norm"] == norm].groupby("value")["count"].sum()
        assert group == pytest.approx((counts / (3 * 64)).to_dict())
    assert [stairs.get_label() for stairs in elements.patches][3:] == ["RMSNorm", "MXNorm p=1", "MXNorm p=2"]
    for stairs in elements.patches:
        density, edges, _ = stairs.get_data()
        assert (density * np.diff(edges)).sum() == pytest.approx(1)
    means = load_table([study], "fidelity").groupby(["block_size", "p", "blocks"])["r_squared"].mean()
    curves = [container.lines[0] for container in fidelity.containers]
    for curve, (_, one) in zip(curves, means.groupby(level=[0, 1]), strict=True):
        assert list(curve.get_xdata()) == [1, 2, 4]
        assert 1 - curve.get_ydata() == pytest.approx(one.to_numpy())
    low, high = fidelity.get_ylim()
    assert low > max(curve.get_ydata().max() for curve in curves) > high  # r^2 grows upwards


def test_a_density_is_that_of_what_was_rounded() -> None:
    """The density is that of what was rounded.

    Numbers are even in -6..6, and each of E2M1's values has the share that rounds to it, so the density is flat except
    at the ends.
    """
    grid = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = np.concatenate(([-7], (grid[1:] + grid[:-1]) / 2, [7]))
    density, edges = fig02_approximation.density(pd.DataFrame({"value": grid, "count": np.diff(middles) * 1000}))
    assert (edges == np.arange(-7, 8)).all()
    assert density == pytest.approx(1 / 14)


@pytest.mark.integration
def test_theorem_1_and_the_bounds_are_as_in_the_tables(study: RunFolder, monkeypatch) -> None:
    mean, spread, reach, ratio = drawn(theorem1_bounds, monkeypatch, "--runs", str(study.path)).axes
    convergence = load_table([study], "convergence").set_index(["distribution", "p"])
    curves = {line.get_label(): line for line in mean.lines if line.get_label() != "limit"}
    limits = [line.get_ydata()[0] for line in mean.lines if line.get_label() == "limit"]
    assert limits == pytest.approx([convergence.loc[_cell(label), "limit"].iloc[0] for label in curves])
    for (label, curve), other in zip(curves.items(), spread.lines, strict=False):
        one = convergence.loc[_cell(label)]
        assert list(curve.get_xdata()) == list(one["blocks"])
        assert list(curve.get_ydata()) == list(one["mean"])
        assert list(other.get_ydata()) == list(one["std"])
    bounds = load_table([study], "bounds").set_index("norm")
    drawn_bars = [[bar.get_height() + bar.get_y() for bar in group] for group in reach.containers]
    ratios = [[bar.get_height() + bar.get_y() for bar in group] for group in ratio.containers]
    for i, norm in enumerate(("RMSNorm", "MXNorm p=1", "MXNorm p=2")):
        assert drawn_bars[2 * i] == pytest.approx(list(bounds.loc[norm, "absmax"]))
        assert drawn_bars[2 * i + 1] == pytest.approx(list(bounds.loc[norm, "bound"]))
        assert ratios[i] == pytest.approx(list(bounds.loc[norm, "rms_ratio"]))


def _cell(label: str) -> tuple[str, float]:
    """'laplace, p=2'"""
    name, p = label.split(", p=")
    return name, float(p)


@pytest.mark.integration
def test_the_quality_of_casts_is_as_in_the_table(study: RunFolder, monkeypatch) -> None:
    panels = np.reshape(drawn(cast_quality, monkeypatch, "--runs", str(study.path)).axes, (3, 4))
    rows = load_table([study], "quality")
    for column, name in zip(panels.T, cast_quality.TITLES, strict=True):
        one = rows[(rows["input"] == name) & (rows["pre_round"] == (rows["rounding"] == "away"))]
        gain, sqnr, last_bin = (
            sorted(y for line in axes.lines if line.get_linestyle() == "None" for y in line.get_ydata())
            for axes in column
        )
        assert gain == pytest.approx(sorted(100 * (one["gain"] - 1)))
        assert sqnr == pytest.approx(sorted(one["sqnr_db"]))
        assert last_bin == pytest.approx(sorted(100 * one["overflow"]))
        assert len(gain) == 2 * (6 * 4 + 1)
    assert [text.get_text() for text in panels[2, 0].get_xticklabels()] == list(dict.fromkeys(rows["format"]))


@pytest.mark.integration
def test_the_table_of_formats_stands_beside_the_papers(study: RunFolder, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    formats_table.main(["--runs", str(study.path)])
    assert capsys.readouterr().out == "figures/formats_table.md\n"
    lines = (tmp_path / "figures" / "formats_table.md").read_text().splitlines()
    assert len(lines) == 2 + 7
    assert lines[2] == "| E4M3 | 1.75 * 2^8 | 2^-9 | 17.8 | E8M0 | 1.75 * 2^8, 2^-9, 17.8 |"
    for line in lines[2:7]:
        _, name, largest, smallest, binades, _, printed, _ = (cell.strip() for cell in line.split("|"))
        same = printed == f"{largest}, {smallest}, {binades}"
        assert same == (name != "E3M2")  # the paper misprints its smallest number


@pytest.mark.slow
def test_of_several_runs_the_last_is_drawn_and_named(tmp_path: Path, monkeypatch, capsys) -> None:
    measured(tmp_path, "a" * 12, max_blocks=1)
    last = measured(tmp_path, "b" * 12, max_blocks=1, seed=3)
    *_, reach, _ = drawn(theorem1_bounds, monkeypatch, "--runs", str(tmp_path)).axes
    assert capsys.readouterr().err == "using the last of several runs: unnamed seed=3, bbbbbbbbbbbb\n"
    heights = [bar.get_height() for bar in reach.containers[0]]
    assert heights == pytest.approx(list(load_table([last], "bounds").query("norm == 'RMSNorm'")["absmax"]))


def test_tables_are_read_from_a_run_that_has_them(study: RunFolder, tmp_path: Path, capsys) -> None:
    write_rows(make_folder(tmp_path), [training_row(0)])
    for path, said in (
        (tmp_path, "no run there has any quality"),
        (table_path(study, "quality"), "give the folder of a run, or the prefix of its tables"),
    ):
        with pytest.raises(SystemExit):
            cast_quality.main(["--runs", str(path)])
        assert said in capsys.readouterr().err
