"""Stacks of students are trained whole, killed, stopped, and with replicas that break."""

from __future__ import annotations

import math
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Fault, killed_at, run, run_here, the_run
from each import each, slow_but
from student_runs import CHANGE, columns, configured, make, newest, same_bits, trained

from mxstudy.config.student import StudentProbes
from mxstudy.students import train as student_teacher
from mxstudy.students.stack import Stack
from mxstudy.students.stack_probes import StackProbes
from mxstudy.students.train import next_stop, step_of_death
from mxstudy.tracking.columnar_journal import ColumnsError
from mxstudy.tracking.folder import RunFolder, checkpoints_in
from mxstudy.tracking.journal import read_journal

pytestmark = pytest.mark.integration

STEPS, ABSURD = 24, 1e30  # a learning rate after which no number is finite


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("undisturbed"))


def replica_rows(folder: RunFolder) -> dict[int, dict[str, float]]:
    rows = read_journal(folder.journal_path)
    return {row["step"]: row["values"] for row in rows if row.get("probe") == "replicas"}


# ------------------------------------------------------------------------------------------------- a whole run


def test_a_run_leaves_what_the_engine_gives_step_by_step(undisturbed: RunFolder) -> None:
    config = configured()
    stack, expected = Stack(config, torch.device("cpu")), []
    for step in range(STEPS):
        if step == CHANGE:
            stack.set_precision(step)
        stack.train_step()
        expected.append(torch.stack((stack.losses, stack.grad_norms)).numpy().copy())
    assert columns(undisturbed).tobytes() == np.stack(expected).tobytes()
    name, tensors = newest(undisturbed)
    assert name == "step_00000024"
    assert int(tensors["step"]) == STEPS
    parameters = dict(stack.model.named_parameters())
    assert {key for key in tensors if key.startswith("model.")} == {f"model.{key}" for key in parameters}
    assert all(torch.equal(tensors[f"model.{key}"], p.detach()) for key, p in parameters.items())
    assert {key.partition(".")[0] for key in tensors} == {"step", "alive", "model", "optimizer"}


def test_it_says_its_plan_and_its_state(undisturbed: RunFolder) -> None:
    status, rows = undisturbed.status(), read_journal(undisturbed.journal_path)
    assert (status.state, status.step, status.steps, status.reason) == ("finished", STEPS, STEPS, None)
    plans = {row["step"]: set(row["precision"].values()) for row in rows if "precision" in row}
    assert plans == {0: {"mxfp8"}, CHANGE: {"mxfp8_forward_only"}}
    up, down, bias, gain_and_bias = 32 * 128, 128 * 32, 32, 64
    assert rows[0]["parameters"] == 2 * (up + down + bias + gain_and_bias)


def test_the_journal_has_every_50th_step_and_the_last(tmp_path: Path) -> None:
    folder = trained(tmp_path, train__steps=120, lrs=[1e-3, 2e-3], model__num_layers=1)
    values, rows = columns(folder), replica_rows(folder)
    assert list(rows) == [0, 50, 100, 119]
    names = ["seed0_lr0.001", "seed1_lr0.001", "seed0_lr0.002", "seed1_lr0.002"]
    for step, row in rows.items():
        for number, name in enumerate(names):
            assert (row[f"loss/{name}"], row[f"grad_norm/{name}"]) == tuple(values[step, :, number])
        assert row["train/loss"] == np.median(values[step, 0])
        assert row["train/not_finite"] == 0
        assert len(row) == 2 + 2 * len(names)


def test_checkpoints_at_other_steps_change_no_bit(tmp_path: Path, undisturbed: RunFolder) -> None:
    assert same_bits(trained(tmp_path / "rare", checkpoint__every_steps=0), undisturbed)
    assert same_bits(trained(tmp_path / "often", checkpoint__every_steps=3), undisturbed)


def test_a_change_of_precision_matters_from_its_step_on(tmp_path: Path, undisturbed: RunFolder) -> None:
    same = trained(tmp_path, precision__schedule=[{"plan": {"layers.*": "mxfp8"}}])
    differs = (columns(same) != columns(undisturbed)).any(axis=2)
    assert not differs[: CHANGE + 1, 0].any()  # the loss of that step still has the same weights and forward
    assert not differs[:CHANGE, 1].any()
    assert differs[CHANGE, 1]
    assert differs[CHANGE + 1 :].all()


def test_stops_are_where_something_is_due() -> None:
    config = configured(train__steps=1234, checkpoint__every_steps=70)
    due = {s for s in range(1, 1235) if s % 500 == 0 or s % 70 == 0 or s in (CHANGE, 1234)}
    step, stops = 0, []
    while step < 1234:
        step = next_stop(config, step)
        stops.append(step)
    assert stops == sorted(due)


@each("name", [field.name for field in fields(StudentProbes)])
def test_there_is_a_stop_for_every_probe(name: str) -> None:
    assert next_stop(configured(checkpoint__every_steps=0, probe={name: {"every_steps": 7}}), 0) == 7


# ------------------------------------------------------------------------------------------ killed and stopped


@pytest.mark.parametrize("step", slow_but([5, CHANGE, 16], [0, 5, 8, 9, CHANGE, 12, 16, 23]))
def test_a_run_that_broke_off_goes_on_to_identical_bits(
    step: int, tmp_path: Path, undisturbed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole = configured(), Stack.train_step
    folder = make(tmp_path, config)

    def breaks(stack: Stack) -> None:
        if int(stack.step) == step:
            raise MemoryError
        whole(stack)

    monkeypatch.setattr(Stack, "train_step", breaks)
    with pytest.raises(MemoryError):
        student_teacher.run(config, folder, "arm")
    monkeypatch.undo()
    assert len(columns(folder)) == 8 * (step // 8)
    assert student_teacher.run(config, folder, "arm") == "finished"
    assert same_bits(folder, undisturbed)
    plans = [row for row in read_journal(folder.journal_path) if "precision" in row]
    assert set(plans[-1]["precision"].values()) == {"mxfp8_forward_only"}
    assert list(replica_rows(folder)) == [0, STEPS - 1]


@pytest.mark.slow
def test_optimizers_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for optimizer in ({"kind": "sgd"}, {"kind": "sgd", "momentum": 0.9}):
        config, whole = configured(optimizer=optimizer), Stack.train_step
        expected = trained(tmp_path / "whole", optimizer=optimizer)
        folder = make(tmp_path / "broken", config)
        monkeypatch.setattr(Stack, "train_step", lambda s, w=whole: w(s) if int(s.step) != 13 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            student_teacher.run(config, folder, "arm")
        monkeypatch.undo()
        student_teacher.run(config, folder, "arm")
        assert same_bits(folder, expected)


TINY = (
    "+experiment=student_teacher",
    "+debug=tiny",
    "runs_dir=runs",
    "tracking=none",
    "train.steps=24",
    "checkpoint.every_steps=8",
)
MOMENTS = {  # in the order in which a run meets them
    "as the first steps are written": killed_at(r"os\.rename .*columns/\.steps_00000000"),
    "between columns and checkpoint": killed_at(r"os\.rename .*/\.step_00000008"),
    "as a row is written": killed_at(r'os\.write .*"step": 23, "probe"', torn=True),
    "as later steps are written": killed_at(r"os\.rename .*columns/\.steps_00000016"),
    "as the last checkpoint is renamed": killed_at(r"os\.rename .*/\.step_00000024"),
}


@pytest.mark.slow
def test_killed_in_every_one_of_its_lives(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", *TINY)[0] == 0
    for moment, fault in MOMENTS.items():
        code, said = run(tmp_path / "killed", *TINY, fault=fault)
        assert code == -signal.SIGKILL, f"{moment}: {said}"
    code, said = run(tmp_path / "killed", *TINY)
    assert code == 0, said
    assert "goes on: was killed at step" in said
    assert same_bits(RunFolder(the_run(tmp_path / "killed")), RunFolder(the_run(tmp_path / "whole")))


@pytest.mark.slow
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    fault = Fault(r'os\.write .*"step": 0, "probe": "replicas"', signal.SIGTERM)
    code, said = run(tmp_path / "stopped", *TINY, fault=fault)
    assert code == 143, said
    folder = RunFolder(the_run(tmp_path / "stopped"))
    assert (folder.status().state, folder.status().reason, folder.status().step) == ("preempted", "SIGTERM", 8)
    assert run(tmp_path / "stopped", *TINY)[0] == run(tmp_path / "whole", *TINY)[0] == 0
    assert same_bits(folder, RunFolder(the_run(tmp_path / "whole")))


def test_a_signal_is_obeyed_after_the_step_in_which_it_comes(
    tmp_path: Path, undisturbed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole = configured(checkpoint__every_steps=0), Stack.train_step
    folder = make(tmp_path, config)

    def signalled(stack: Stack) -> None:
        whole(stack)
        if int(stack.step) == 5:
            signal.raise_signal(signal.SIGUSR2)

    monkeypatch.setattr(Stack, "train_step", signalled)
    assert student_teacher.run(config, folder, "arm") == "preempted"
    monkeypatch.undo()
    assert (folder.status().step, folder.status().reason) == (5, "SIGUSR2")
    assert columns(folder).tobytes() == columns(undisturbed)[:5].tobytes()
    assert newest(folder)[0] == "step_00000005"
    assert student_teacher.run(config, folder, "arm") == "finished"
    assert columns(folder).tobytes() == columns(undisturbed).tobytes()


# ------------------------------------------------------------------------------------------------ what breaks


def test_a_replica_that_breaks_leaves_its_neighbours_every_bit(tmp_path: Path) -> None:
    well = trained(tmp_path, lrs=[1e-3, 2e-3])
    ill = trained(tmp_path, lrs=[1e-3, ABSURD])
    assert ill.status().state == "finished"
    ours, theirs = columns(ill), columns(well)
    assert ours[..., :2].tobytes() == theirs[..., :2].tobytes()
    assert ours[0, :, 2:].tobytes() == theirs[0, :, 2:].tobytes()  # complete up to where it breaks
    assert np.isfinite(theirs).all()
    assert not np.isfinite(ours[-1, :, 2:]).all(axis=0).any()
    ill_tensors, well_tensors = newest(ill)[1], newest(well)[1]
    assert all(torch.equal(ill_tensors[key][:2], well_tensors[key][:2]) for key in well_tensors if key != "step")
    last = replica_rows(ill)[STEPS - 1]
    assert last["train/not_finite"] == 2
    assert last["train/loss"] == np.median(theirs[-1, 0, :2])


@pytest.mark.parametrize("every_steps", [0, 1, 8])
def test_a_run_ends_where_its_last_replica_does(
    every_steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, lrs=[ABSURD], checkpoint__every_steps=every_steps)
    values, status = columns(folder), folder.status()
    dead = len(values) - 1
    assert 0 < dead < STEPS - 1
    assert not np.isfinite(values[dead]).all(axis=0).any()
    assert np.isfinite(values[dead - 1]).all(axis=0).any()
    assert (status.state, status.step) == ("diverged", dead)
    assert status.reason == "none of 2 replicas is finite"
    name, tensors = newest(folder)
    assert (name, int(tensors["step"])) == (f"step_{dead:08d}", dead)
    assert max(replica_rows(folder)) == dead
    assert math.isnan(replica_rows(folder)[dead]["train/loss"])
    assert "diverged: none of 2 replicas is finite; everything up to that step is in" in capfd.readouterr().out


def test_the_step_of_death() -> None:
    """A replica is dead from the step at which its loss or gradient norm is not finite."""
    nan, inf = math.nan, math.inf
    alive, half, dead, also_dead = [[1, 1], [1, 1]], [[1, nan], [1, 1]], [[nan, 1], [1, inf]], [[nan, nan], [nan, nan]]
    cases: list[tuple[list[Any], int | None]] = [
        ([alive, half], None),
        ([alive, dead, alive], None),
        ([alive, dead, half, dead, also_dead], 3),
        ([dead, dead], 0),
        ([alive, dead], 1),
    ]
    assert [step_of_death(np.array(rows, np.float32)) for rows, _ in cases] == [end for _, end in cases]


def test_damaged_columns_stop_a_resume_before_a_step(tmp_path: Path) -> None:
    config = configured()
    folder = make(tmp_path, config)
    student_teacher.run(config, folder, "arm")
    (folder.columns / "steps_00000008.parquet").write_bytes(b"PAR1")
    with pytest.raises(ColumnsError, match=r"steps_00000008\.parquet: truncated or corrupt .*; rerun=true [^;]*$"):
        student_teacher.run(config, folder, "arm")


def test_lost_columns_are_trained_again_from_the_checkpoint_that_the_message_names(
    tmp_path: Path, undisturbed: RunFolder
) -> None:
    config = configured(checkpoint={"every_steps": 8, "keep_last": 9})
    folder = make(tmp_path, config)
    student_teacher.run(config, folder, "arm")
    lost = folder.columns / "steps_00000008.parquet"
    lost.unlink()
    where = rf"rerun=true trains them again; to go on from step_00000008, .* of later steps in {folder.checkpoints}$"
    with pytest.raises(ColumnsError, match=where):
        student_teacher.run(config, folder, "arm")
    for later in checkpoints_in(folder.checkpoints)[1:]:
        shutil.rmtree(later)
    student_teacher.run(config, folder, "arm")
    assert columns(folder).tobytes() == columns(undisturbed).tobytes()


# -------------------------------------------------------------------------------------------------- while watched

SHARPNESS = {"every_steps": 6, "iterations": 2}
PROBES = {"last_bin": {"every_steps": 6}, "gradient_bias": {"every_steps": 6, "coupled": True}, "sharpness": SHARPNESS}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("watched"), probe=PROBES)


def broken(path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run with all probes that broke off at step 13, so that its checkpoint is that of step 8."""
    config, whole = configured(probe=PROBES), Stack.train_step
    folder = make(path, config)
    monkeypatch.setattr(Stack, "train_step", lambda s: whole(s) if int(s.step) != 13 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        student_teacher.run(config, folder, "arm")
    monkeypatch.undo()
    return folder


def measured(folder: RunFolder, name: str) -> dict[int, dict[str, list[float]]]:
    return {row["step"]: row["values"] for row in read_journal(folder.journal_path) if row.get("probe") == name}


def test_a_watched_run_is_the_same_run_and_resumes(
    tmp_path: Path, undisturbed: RunFolder, watched: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert columns(watched).tobytes() == columns(undisturbed).tobytes()
    folder = broken(tmp_path, monkeypatch)
    student_teacher.run(configured(probe=PROBES), folder, "arm")
    assert same_bits(folder, watched)
    kept = {key.partition(".")[0] for key in newest(folder)[1]}
    assert kept == {"step", "alive", "model", "optimizer", "twin", "probe"}
    for name in ("last_bin", "gradient_bias", "coupled_gradient_bias", "sharpness"):
        ours, theirs = measured(folder, name), measured(watched, name)
        assert list(ours) == [0, 6, 12, 18]
        assert ours == theirs


def test_a_checkpoint_of_earlier_code_lacks_the_probes_vectors_which_then_start_afresh(
    tmp_path: Path, watched: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackProbes, "named_state", lambda probes: {})
    folder = broken(tmp_path, monkeypatch)
    assert not [key for key in newest(folder)[1] if key.startswith("probe.")]
    student_teacher.run(configured(probe=PROBES), folder, "arm")
    assert columns(folder).tobytes() == columns(watched).tobytes()
    ours, theirs = measured(folder, "sharpness"), measured(watched, "sharpness")
    assert ours.keys() == theirs.keys()
    assert {step for step in ours if ours[step] != theirs[step]} == {12, 18}


# ------------------------------------------------------------------------------------- MLflow, and the command line


@pytest.mark.slow
def test_mlflow_gets_what_the_journal_has_of_each_replica(tmp_path: Path, uri: str) -> None:
    from mxstudy.tracking.mlflow_store import connect

    folder = trained(tmp_path, train__steps=60, model__num_layers=1, lrs=[1e-3, ABSURD], tracking__uri=uri)
    values, client = columns(folder), connect(uri)
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert (found.info.status, found.data.tags["status"], found.data.tags["study"]) == (
        "FINISHED",
        "finished",
        "student_teacher",
    )
    for name, number in {"seed1_lr0.001": 1, "seed0_lr1e+30": 2}.items():
        for row, quantity in enumerate(("loss", "grad_norm")):
            history = client.get_metric_history(found.info.run_id, f"{quantity}/{name}".replace("+", "_"))
            points = {point.step: point.value for point in history}
            assert sorted(points) == [0, 50, 59]
            finite = {step: v for step, v in points.items() if math.isfinite(values[step, row, number])}
            assert finite == {step: float(values[step, row, number]) for step in finite}
    assert found.data.metrics["train/not_finite"] == 2
    assert found.data.metrics["train/loss"] == np.median(values[59, 0, :2])
    kept = {file.path for file in client.list_artifacts(found.info.run_id, "columns")}
    assert kept == {f"columns/{path.name}" for path in folder.columns.iterdir()}


def test_a_sweep_of_stacks_ends_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ("norm=none,rmsnorm", "student.gain=fp32", "lrs=[1e-3,1e30]", "seeds=[0]", "train.steps=10")
    run_here(tmp_path, "+experiment=student_teacher", "+debug=tiny", "runs_dir=runs", "tracking=none", *arms)
    said = capsys.readouterr().out
    table = said[said.rindex("loss of the last step") :]
    lines = [line.split() for line in table.splitlines() if "lr=" in line]
    assert [line[:3] for line in lines] == [
        [norm, f"lr={lr}", "1"] for norm in ("none", "rmsnorm") for lr in ("0.001", "1e+30")
    ]
    assert [line[7:9] for line in lines[::2]] == [["0", "0"], ["0", "0"]]
    assert [line[3:8] for line in lines[1::2]] == [["-", "-", "..", "-", "1"]] * 2
