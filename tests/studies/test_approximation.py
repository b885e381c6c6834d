"""The approximation study, as a kind of run, has seeds, refusals, tables and a report, and survives a kill."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from commands import killed_at, run
from each import each, slow_but
from pandas.testing import assert_frame_equal
from tracked import make_folder

from mxstudy import results
from mxstudy.config import Approximation, read_run
from mxstudy.reader import ConfigError
from mxstudy.studies.approximation import run as study
from mxstudy.studies.approximation.tables import TABLES
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.mlflow_store import connect

TINY: dict[str, Any] = {"draws": 2, "rows": 8, "hidden_size": 256, "max_blocks": 4, "elements": 4096}
R_SQUARED = "approximation/r_squared.B32_p2"


def table(name: str, **values: Any) -> pd.DataFrame:
    return pd.DataFrame(TABLES[name](Approximation(**values)))


@functools.cache
def tiny(name: str) -> pd.DataFrame:
    return table(name, **TINY)


# ------------------------------------------------------------------------------------------------------ all tables


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(list(TABLES)[::3], TABLES))
def test_a_seed_decides_the_numbers(name: str) -> None:
    first = tiny(name)
    assert len(first) > 0
    assert not first.isna().any(axis=None)
    assert_frame_equal(first, table(name, **TINY), check_exact=True)
    if name != "formats":
        assert not first.equals(table(name, **TINY, seed=1))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("distributions", ["norm", "std", "quantity", "value"]),
        ("fidelity", ["block_size", "p", "blocks", "draw"]),
        ("convergence", ["distribution", "p", "blocks"]),
        ("bounds", ["input", "norm"]),
        ("norm_bounds", ["input", "norm", "cast", "outer_scale", "hadamard"]),
        ("quality", ["input", "format", "scale_rule", "rounding", "pre_round"]),
        ("formats", ["format"]),
        ("orientations", ["scale_rule", "casts"]),
    ],
)
def test_a_row_is_a_cell(name: str, cell: list[str]) -> None:
    assert not tiny(name).duplicated(cell).any()


@each(
    ("values", "message"),
    [
        ({"draws": 1}, r"draws: must be at least 2, to have a spread"),
        ({"rows": 0}, r"rows: must lie in 1 .. 16,777,216, not 0"),
        ({"max_blocks": -4}, r"max_blocks: must lie in 1 .. 16,777,216, not -4"),
        ({"elements": 10**30}, r"elements: must lie in 1 .. 2,147,483,648, not 1000"),
        ({"hidden_size": 100}, r"hidden_size: 100 is not a multiple of 64"),
        ({"elements": 1000}, r"elements: 1000 is not a multiple of 1024"),
        ({"stds": []}, r"stds: must be positive"),
        ({"stds": [1.0, -2.0]}, r"stds: must be positive, not \[1.0, -2.0\]"),
        ({"block_size": 24}, r"block_size: 24 is not a choice; choose from 16, 32, 64"),
        ({"format": "E4M2"}, r"format: 'E4M2' is not a choice; did you mean"),
        ({"scale_rule": "rcel"}, r"scale_rule: 'rcel' is not a choice; did you mean 'rceil'\?"),
        ({"hidden_sise": 64}, r"hidden_sise: no such key; did you mean 'hidden_size'\?"),
    ],
)
def test_what_cannot_be_measured_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run({"study": "approximation"} | values)


# ------------------------------------------------------------------------------------------------------- the whole run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("approximation")


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    code, said = run(folder, "+experiment=approximation", "+debug=tiny", "runs_dir=runs")
    assert code == 0, said
    return said


def the_run(folder: Path) -> RunFolder:
    (one,) = find_runs(folder / "runs")
    return one


@pytest.mark.slow
def test_a_run_leaves_its_tables_with_where_they_come_from(said: str, folder: Path) -> None:
    one = the_run(folder)
    assert one.status().state == "finished"
    assert one.status().step == one.status().steps == len(TABLES)
    for name in TABLES:
        frame, about = results.read_table(results.table_path(one, name))
        assert_frame_equal(frame, tiny(name), rtol=1e-9)
        assert (about["label"], about["torch"]) == ("approximation", torch.__version__)
        loaded = results.load_table([one], name)
        assert set(loaded["fingerprint"]) == {one.status().fingerprint}
        assert_frame_equal(loaded[frame.columns], frame)


@pytest.mark.integration
def test_the_terminal_has_the_tables_in_80_columns_and_how_to_draw_them(said: str, folder: Path) -> None:
    report = said[said.index("formats  ") :]
    commands = [line for line in report.splitlines() if "python -m mxstudy figure" in line]
    tables = report[: report.index("figures, into figures/")].splitlines()
    assert max(map(len, tables)) <= 80
    assert "…" not in report  # nothing was cut off
    for row in ("E4M3", "NVFP4", "4 features x 1000", "gain 0.95 +- 0.02", "laplace"):
        assert any(line.strip().startswith(row) for line in tables)
    assert [line.split()[4] for line in commands] == list(study.FIGURES)
    path = the_run(folder).path.relative_to(folder)
    assert all(line.endswith(f"--runs {path}") for line in commands)


def test_the_figures_of_a_rehearsal_go_to_a_folder_of_their_own(tmp_path: Path) -> None:
    rehearsal = make_folder(tmp_path, label="debug=smoke")
    assert study.how_to_draw(rehearsal).startswith("figures, into figures/rehearsals/:\n")


@pytest.mark.integration
def test_mlflow_has_the_curves_the_choices_and_the_tables(said: str, folder: Path) -> None:
    one, uri = the_run(folder), f"sqlite:///{folder}/mlflow.db"
    client = connect(uri)
    mirrored = client.get_run(one.status().mlflow_run_id)
    assert (mirrored.info.status, mirrored.data.tags["status"]) == ("FINISHED", "finished")
    assert (mirrored.data.tags["experiment"], mirrored.data.params["max_blocks"]) == ("approximation", "4")
    rows = {row["step"]: row["values"] for row in read_journal(one.journal_path)}
    curve = {point.step: point.value for point in client.get_metric_history(one.status().mlflow_run_id, R_SQUARED)}
    means = tiny("fidelity").query("block_size == 32 and p == 2").groupby("blocks")["r_squared"].mean()
    assert curve == pytest.approx(means.to_dict())
    assert sorted(rows) == [2**i for i in range(7)]  # as far as Theorem 1 goes
    kept = {artifact.path for artifact in client.list_artifacts(one.status().mlflow_run_id)}
    assert kept == {"config.yaml", "provenance.json", "status.json", "metrics.jsonl", "tables"}
    tables = {artifact.path for artifact in client.list_artifacts(one.status().mlflow_run_id, "tables")}
    assert tables == {f"tables/{name}.parquet" for name in TABLES}


@pytest.mark.slow
def test_it_is_not_measured_twice_and_another_seed_is_another_run(said: str, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/tables/*")}
    code, again = run(folder, "+experiment=approximation", "+debug=tiny", "runs_dir=runs", "seed=0,1", "tracking=none")
    assert code == 0, again
    assert "skipped: finished" in again
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(find_runs(folder / "runs")) == 2


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_tables_that_it_has(tmp_path: Path) -> None:
    command = ("+experiment=approximation", "+debug=tiny", "runs_dir=runs", "tracking=none")
    code, _ = run(tmp_path, *command, fault=killed_at(r"os\.rename .*bounds\.parquet"))
    assert code == -9
    code, again = run(tmp_path, *command)
    assert code == 0, again
    one = the_run(tmp_path)
    assert one.status().state == "finished"
    for name in TABLES:
        assert_frame_equal(results.read_table(results.table_path(one, name))[0], tiny(name), rtol=1e-9)
