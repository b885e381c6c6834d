"""The figure and table of interventions are right for forks whose ends are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.instability import fig04_interventions as figure
from mxstudy import results
from mxstudy.results import read_table

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("figure_rules")]
STEPS = 40


def forks(intervention: str, points: tuple[str, ...] = ("0.88", "before 10"), lost: int = 0) -> pd.DataFrame:
    """Return forks of four parents. The first `lost` of every point diverge, and the last is open."""
    rows = [
        {"fork": 4 * number + seed, "point": point, "seed": seed, "data_seed": 0, "step": 100 * seed}
        | {"loss": 1.0 + seed, "diverged_at": 100.0 * seed + 7 if seed < lost else np.nan}
        | {"rising_at": 9.0 if seed == 3 else np.nan}
        for number, point in enumerate(points)
        for seed in range(4)
    ]
    return pd.DataFrame(rows).assign(fingerprint=intervention * 4, label=intervention, parent="p" * 64)


def write(path: Path, arms: dict[str, int]) -> None:
    tables = {name: forks(name, lost=lost) for name, lost in arms.items()}
    every = pd.concat(tables.values(), ignore_index=True)
    runs = [
        {"fingerprint": name * 4, "label": name, "choice.intervention": name, "config.study": "fork"} for name in arms
    ]
    steps = np.arange(STEPS)
    metrics = [
        pd.DataFrame({"step": row.step + steps, "loss": np.exp(-steps / 20.0) * row.loss}).assign(
            fingerprint=row.fingerprint, label=row.label, fork=row.fork, grad_norm=1.0
        )
        for row in every.itertuples()
    ]
    for kind, frame in {"runs": pd.DataFrame(runs), "forks": every, "fork_metrics": pd.concat(metrics)}.items():
        results.write_table(frame, path / f"known_{kind}.parquet", {})


def test_table_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"fp32": 0, "none": 3, "perturbed": 2, "rceil": 2})
    monkeypatch.chdir(tmp_path)
    figure.main(["--runs", str(tmp_path / "known")])
    caption = (tmp_path / "figures/instability_fig04_interventions.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in caption.splitlines() if line.startswith("| ")]
    named = {(line[0], line[1]): line[2:] for line in lines[1:]}
    assert list(named)[:4] == [(name, "0.88") for name in ("none", "perturbed", "fp32", "rceil")]
    forks_, open_, diverged, _, steps, less, loss = named["fp32", "before 10"]
    assert (forks_, open_, diverged, steps) == ("4", "1", "0 of 4", "-")
    assert named["none", "0.88"][4] == "7, 7, 7"
    assert less == "-0.50, 1: cannot tell"  # one data seed
    assert loss == "2 (1 .. 3)"
    assert named["rceil", "0.88"][5].startswith("+0.00")
    assert (tmp_path / "figures/instability_fig04_interventions.png").stat().st_size > 10_000


def test_forks_that_blow_up_stay_in_the_median(tmp_path: Path) -> None:
    write(tmp_path, {"none": 0})
    read = {kind: read_table(tmp_path / f"known_{kind}.parquet")[0] for kind in ("runs", "forks", "fork_metrics")}
    metrics = read["fork_metrics"].merge(read["forks"][["fork", "seed", "step"]], on="fork", suffixes=("", "_of_fork"))
    since = metrics.pop("step_of_fork").rsub(metrics["step"])
    gone = (metrics.pop("seed") > 0) & (since == 20)
    metrics.loc[gone, "loss"] = np.nan
    metrics = metrics[~((metrics["fork"] % 4 > 0) & (since > 20))]
    drawn = figure.draw(figure.with_outcomes(read["forks"], read["runs"]), metrics)
    for axes in drawn.axes[:-1]:
        values = np.asarray(axes.lines[0].get_ydata(), float)
        assert np.isfinite(values[:20]).all()
        assert np.isnan(values[20:]).all()  # three of four


def test_curves_begin_at_the_fork(tmp_path: Path) -> None:
    write(tmp_path, {"fp32": 0, "none": 2})
    read = {kind: read_table(tmp_path / f"known_{kind}.parquet")[0] for kind in ("runs", "forks", "fork_metrics")}
    drawn = figure.draw(figure.with_outcomes(read["forks"], read["runs"]), read["fork_metrics"])
    *panels, fractions = drawn.axes
    assert [label.get_text() for label in fractions.get_yticklabels()] == ["none (dashed)", "fp32"]
    shares = [line.get_xdata()[0] for line in fractions.lines]
    np.testing.assert_allclose(shares, [2 / 4, 2 / 4, 0, 0])  # shares of all four, at two points
    assert [axes.get_title() for axes in panels] == ["at 0.88 of the way to divergence", "10 steps before divergence"]
    for axes in panels:
        for line in axes.lines:
            np.testing.assert_array_equal(line.get_xdata(), np.arange(STEPS))
            np.testing.assert_allclose(line.get_ydata(), 2.0 * np.exp(-np.arange(STEPS) / 20.0))  # the lower median
        assert axes.lines[0].get_color() == figure.BLACK
