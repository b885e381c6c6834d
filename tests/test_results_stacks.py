"""A stack's columns become as many runs, in frames and in tables, and MLflow gets its part of them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from tracked import CONFIG, make_folder, training_row, write_rows

from analysis import export
from mxstudy import results
from mxstudy.config import read_run
from mxstudy.students.tables import arm_cells, show_arms, summarise
from mxstudy.tracking.columnar_journal import Columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_metrics import metrics_of
from mxstudy.tracking.provenance import provenance

STEPS = 1200
STACK: dict[str, Any] = {
    "study": "student_teacher",
    "seeds": [3, 4],
    "lrs": [1e-3, 5e-4],
    "data_seed": 7,
    "model": {"kind": "residual_mlp", "hidden_size": 32, "num_layers": 1},
    "norm": {"kind": "layernorm", "bias": True},
    "optimizer": {"kind": "adam"},
    "schedule": {"kind": "constant"},
    "train": {"steps": STEPS, "batch_size": 32},
}


def stack_folder(runs: Path, fingerprint: str = "c" * 64, state: str = "finished") -> RunFolder:
    """Write four replicas: one learns, one jumps and recovers, one jumps and does not, one becomes NaN."""
    config = read_run({"precision": CONFIG["precision"], "experiment": "stacks"} | STACK)
    about = provenance() | {"label": "norm=layernorm", "choices": {"norm": "layernorm"}}
    folder = RunFolder.create(runs / "stacks" / fingerprint[:12], config, fingerprint, about)
    columns = Columns(folder.columns, 4, 0)
    columns.append(curves())
    columns.flush()
    folder.update(state=state, step=STEPS, steps=STEPS)
    return folder


def curves() -> np.ndarray:
    values = np.empty((STEPS, 2, 4), np.float32)
    values[:, 0] = np.linspace(1.0, 0.1, STEPS)[:, None]
    values[:, 1] = 2 * values[:, 0]
    values[300, 0, 1] = 500.0
    values[400:, 0, 2] = 700.0
    values[900:, 1, 3], values[901:, 0, 3] = np.inf, np.nan
    return values


def test_a_row_a_replica(tmp_path: Path) -> None:
    runs, values = results.load([stack_folder(tmp_path).path], "runs"), curves()
    assert list(runs["fingerprint"]) == ["c" * 64] * 4
    assert list(runs["replica"]) == [0, 1, 2, 3]
    assert list(runs["seed"]) == list(runs["config.seed"]) == [3, 4, 3, 4]
    assert list(runs["lr"]) == list(runs["config.lr"]) == [1e-3, 1e-3, 5e-4, 5e-4]
    assert set(runs["data_seed"]) == set(runs["config.data_seed"]) == {7}
    assert list(runs["label"])[::3] == ["norm=layernorm seed=3 lr=0.001", "norm=layernorm seed=4 lr=0.0005"]
    assert not any(column.startswith(("config.seeds", "config.lrs")) for column in runs)
    assert list(runs["state"]) == ["finished"] * 3 + ["diverged"]
    assert list(runs["loss"][:3]) == list(values[-1, 0, :3])
    assert math.isnan(runs["loss"][3])
    assert list(runs["best_loss"]) == [
        values[:, 0, 0].min(),
        values[:, 0, 1].min(),
        values[399, 0, 2],
        values[899, 0, 3],
    ]
    assert list(runs["first_not_finite"])[3] == 900
    assert runs["first_not_finite"][:3].isna().all()
    assert list(runs["outcome.spikes"])[:3] == [0, 1, 1]
    assert list(runs["outcome.unrecovered"])[:3] == [0, 0, 1]
    assert list(runs["outcome.diverged_at"])[2] == 400
    assert (runs["choice.norm"][0], runs["config.model.hidden_size"][0]) == ("layernorm", 32)


@pytest.mark.integration
def test_a_stack_that_goes_on_or_is_queued(tmp_path: Path) -> None:
    going = results.load_runs([stack_folder(tmp_path, state="running")])
    assert set(going["state"]) == {"running"}
    queued = stack_folder(tmp_path, "d" * 64, state="queued")
    for path in queued.columns.iterdir():
        path.unlink()
    frame = results.load_runs([queued])
    assert frame[["loss", "best_loss", "first_not_finite"]].isna().all(axis=None)
    assert results.load_metrics([queued]).empty


def test_a_row_a_step_and_replica(tmp_path: Path) -> None:
    metrics, values = results.load([stack_folder(tmp_path).path], "metrics"), curves()
    assert list(metrics) == ["fingerprint", "label", "replica", "seed", "step", "loss", "grad_norm"]
    assert len(metrics) == 4 * STEPS
    assert metrics["loss"].dtype == np.float32
    for number, rows in metrics.groupby("replica"):
        assert list(rows["step"]) == list(range(STEPS))
        assert set(rows["seed"]) == {[3, 4, 3, 4][number]}
        ours = rows[["loss", "grad_norm"]].to_numpy()
        assert np.array_equal(ours, values[:, :, number], equal_nan=True)


def test_a_probe_has_a_row_a_measurement_and_replica(tmp_path: Path) -> None:
    folder = stack_folder(tmp_path)
    for step in (0, 50):
        values = {"layers.0.up/gain": [0.1 + step, 0.2, 0.3, math.nan]}
        write_rows(folder, [{"step": step, "probe": "last_bin", "values": values}])
    frame = results.load([folder.path], "last_bin")
    assert list(frame) == ["fingerprint", "label", "replica", "seed", "step", "layers.0.up/gain"]
    assert list(zip(frame["step"], frame["replica"], strict=True)) == [(s, r) for s in (0, 50) for r in range(4)]
    assert list(frame["layers.0.up/gain"][4:7]) == [50.1, 0.2, 0.3]
    assert "last_bin" in [kind for kind, _, _ in export.tables_of([str(folder.path)])]


def test_stacks_and_single_runs_side_by_side(tmp_path: Path) -> None:
    single = make_folder(tmp_path)
    write_rows(single, [training_row(step) for step in range(3)])
    both = [single, stack_folder(tmp_path)]
    runs, metrics = results.load_runs(both), results.load_metrics(both)
    assert len(runs) == 1 + 4
    assert len(metrics) == 3 + 4 * STEPS
    assert list(metrics["loss"][:3]) == [5.0, 4.9, 4.8]
    assert metrics["replica"][:3].isna().all()


@pytest.mark.integration
def test_an_exported_stack_gives_the_same_frames_and_is_compact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, to = stack_folder(tmp_path), tmp_path / "out"
    command = ["export", "--runs", str(folder.path), "--name", "st", "--to", str(to)]
    monkeypatch.setattr(sys, "argv", command)
    export.main()
    for kind in ("runs", "metrics"):
        there, here = results.load([to / "st"], kind), results.load([folder.path], kind)
        shown = {"folder": [f"stacks/{'c' * 12}"] * len(here)} if kind == "runs" else {}
        assert_frame_equal(there, here.assign(**shown), check_dtype=False, rtol=2**-12)  # gradient norms keep 12 bits
    noise = np.random.default_rng(0).standard_normal((5000, 2, 4)).astype(np.float32)
    for path in folder.columns.iterdir():
        path.unlink()
    columns = Columns(folder.columns, 4, 0)
    columns.append(noise)
    export.main()
    assert (to / "st_metrics.parquet").stat().st_size < 8.5 * 5000 * 4  # two numbers of 4 bytes per step and replica
    monkeypatch.setattr(sys, "argv", [*command, "--every-steps", "10"])
    export.main()
    thinned = results.load([to / "st"], "metrics")
    assert sorted(set(thinned["step"])) == [*range(0, 5000, 10), 4999]
    assert len(thinned) == 4 * 501
    assert list(thinned[thinned["replica"] == 2]["loss"])[-1] == noise[-1, 0, 2]


def test_thinning_keeps_the_last_step_of_each_run(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path, letter * 64) for letter in "ab"]
    for folder, steps in zip(folders, (8, 12), strict=True):
        write_rows(folder, [training_row(step) for step in range(steps)])
    metrics = results.load_metrics(folders)
    assert list(export.thinned(metrics, "metrics", 5)["step"]) == [0, 5, 7, 0, 5, 10, 11]


def test_the_table_of_the_arms_counts_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stack_folder(tmp_path)
    last = curves()[-1, 0]
    cells = show_arms([folder])
    assert [row[0] for row in cells] == ["lr=0.001", "lr=0.0005"]  # one arm per learning rate
    assert cells[1][1:5] == ("2", "700", "700 .. 700", "1")
    assert cells[0] == ("lr=0.001", "2", f"{last[0]:.3g}", f"{last[0]:.3g} .. {last[0]:.3g}", *"0100")
    assert all(len(line) <= 120 for line in capsys.readouterr().out.splitlines())
    line = summarise({"": folder}, {}).result
    assert (
        line == f"median loss: lr=0.001 {last[0]:.3g} (0 of 2 diverged), lr=0.0005 700 ({cells[1][-1]} of 2 diverged)"
    )
    dead = results.load_runs([folder])[3:]
    assert arm_cells(dead)[:4] == ("1", "-", "- .. -", "1")


def test_mlflow_gets_a_folder_of_losses_and_one_of_gradient_norms() -> None:
    values = {"train/loss": 0.5, "train/not_finite": 1, "loss/seed0_lr0.001": 0.5, "grad_norm/seed1": math.inf}
    row = {"step": 50, "probe": "replicas", "values": values, "time_s": 1.0}
    assert dict(metrics_of(row)) == values
