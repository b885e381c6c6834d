"""A run that is stopped at any moment and started again by the same command is the run that was never stopped."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import ONE_BLOCK, TINY, Fault, killed_at, run, started, the_run
from safetensors.torch import load_file

from mxstudy.tracking import memberships
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal

pytestmark = pytest.mark.integration

STEPS, EVERY = 24, 8
COMMAND = (
    *(*TINY, *ONE_BLOCK, "precision=mxfp8", "norm=mxnorm_p2"),
    *(f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}"),
)
WRITES_STEP_11 = r'os\.write .*"step": 11, "tokens"'
MOMENTS = {  # in the order in which a run meets them
    "before the first step": killed_at(r"os\.write .*unigram_entropy"),
    "before the first checkpoint": killed_at(r'os\.write .*"step": 4, "tokens"'),
    "as the first checkpoint's tensors are written": killed_at(r"open .*/\.step_00000008\.\d+/.*safetensors"),
    "in the middle of the journal's line": killed_at(WRITES_STEP_11, torn=True),
    "as validation is recorded": killed_at(r'os\.write .*"step": 14, "validation_loss"'),
    "as a checkpoint's tensors are written": killed_at(r"open .*/\.step_00000016\.\d+/.*safetensors"),
    "as a checkpoint's json is written": killed_at(r"open .*/\.step_00000016\.\d+/\.checkpoint\.json"),
    "as a checkpoint is renamed": killed_at(r"os\.rename .*/\.step_00000016\.\d+',"),
    "as the final checkpoint is renamed": killed_at(r"os\.rename .*/\.step_00000024\.\d+',"),
    "after the final checkpoint, as an old one is deleted": killed_at(r"shutil\.rmtree .*/\.step_00000008'"),
}
SIGNALS = {3: (signal.SIGTERM, 143), 11: (signal.SIGUSR2, 140), 12: (signal.SIGINT, 130)}  # by step, with exit codes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, *COMMAND, cache)[0] == 0
    assert losses(folder)[-1].keys() >= {"validation_loss"}
    return folder


def losses(folder: Path) -> list[dict[str, Any]]:
    """Return, of every valid row with a loss, what does not depend on the clock."""
    rows = read_journal(the_run(folder) / "metrics.jsonl")
    timeless = [{k: v for k, v in row.items() if k not in ("time_s", "tokens_per_s")} for row in rows]
    return [row for row in timeless if {"loss", "validation_loss"} & row.keys()]


def state(folder: Path) -> tuple[str, str | None, int]:
    status = RunFolder(the_run(folder)).status()
    return status.state, status.reason, status.step


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (the_run(folder) / "checkpoints" / f"step_{STEPS:08d}").glob("*.safetensors")
    return load_file(path)


def assert_same(folder: Path, undisturbed: Path) -> None:
    assert state(folder) == ("finished", None, STEPS)
    assert losses(folder) == losses(undisturbed)
    ours, theirs = final_tensors(folder), final_tensors(undisturbed)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert {"model", "optimizer"} == {name.partition(".")[0] for name in theirs}
    kept = sorted(path.name for path in (the_run(folder) / "checkpoints").iterdir())
    assert kept[-2:] == ["step_00000016", "step_00000024"]
    assert not any(name.startswith(".") for name in kept)


def test_a_run_that_was_killed_goes_on_to_identical_bits(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    """The run is killed at one moment. The slow test below kills at all of them."""
    code, said = run(tmp_path, *COMMAND, cache, fault=MOMENTS["in the middle of the journal's line"])
    assert code == -signal.SIGKILL, said
    assert state(tmp_path)[0] == "running"
    code, said = run(tmp_path, *COMMAND, cache)
    assert code == 0, said
    assert "goes on: was killed at step" in said
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_killed_in_every_one_of_its_lives(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    """It is killed at all moments, and each life continues from what the one before has left."""
    codes = [run(tmp_path, *COMMAND, cache, fault=fault)[0] for fault in MOMENTS.values()]
    assert codes == len(MOMENTS) * [-signal.SIGKILL]
    assert run(tmp_path, *COMMAND, cache)[0] == 0
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_what_is_drawn_at_random_is_drawn_again(tmp_path: Path, cache: str) -> None:
    """Stochastic rounding, signs of transforms and dropout."""
    command = (*COMMAND, "precision=mxfp8_sr_rht_2d", "model.dropout=0.2", cache)
    assert run(tmp_path / "undisturbed", *command)[0] == 0
    assert run(tmp_path / "killed", *command, fault=killed_at(WRITES_STEP_11))[0] == -signal.SIGKILL
    code, said = run(tmp_path / "killed", *command)
    assert code == 0, said
    assert "goes on: was killed at step" in said
    assert_same(tmp_path / "killed", tmp_path / "undisturbed")


@pytest.mark.slow
def test_killed_from_outside_in_the_real_command(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    command = [sys.executable, "-m", "mxstudy", *COMMAND, cache]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*/*/checkpoints/step_*")) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert run(tmp_path, *COMMAND, cache)[0] == 0
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    """It is stopped by each signal, and each life continues from what the one before has left."""
    for step, (caught, code) in SIGNALS.items():
        ended, said = run(tmp_path, *COMMAND, cache, fault=Fault(rf'os\.write .*"step": {step}, "tokens"', caught))
        assert ended == code, said
        assert f"stopped by {caught.name} in job 1 of 1; the same command continues" in said
        assert state(tmp_path) == ("preempted", caught.name, step + 1)
        assert losses(tmp_path) == [row for row in losses(undisturbed) if row["step"] <= step]
        assert (the_run(tmp_path) / "checkpoints" / f"step_{step + 1:08d}").is_dir()
    code, said = run(tmp_path, *COMMAND, cache)
    assert code == 0, said
    assert f"goes on: was preempted at step {max(SIGNALS) + 1} of 24" in said
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_signal_before_the_training_is_a_preemption_too(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    fault = Fault(r"open .*/\.shards\.json\.[0-9.]+', 'w'", signal.SIGTERM)
    code, said = run(tmp_path, *COMMAND, cache, fault=fault)
    assert code == 143, said
    assert state(tmp_path) == ("preempted", "SIGTERM", 0)
    assert run(tmp_path, *COMMAND, cache)[0] == 0
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_signal_in_the_last_step_comes_too_late_to_stop_anything(
    tmp_path: Path, cache: str, undisturbed: Path
) -> None:
    fault = Fault(r'os\.write .*"step": 23, "tokens"', signal.SIGTERM)
    code, said = run(tmp_path, *COMMAND, cache, fault=fault)
    assert code == 0, said
    assert state(tmp_path)[0] == "finished"
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.slow
def test_but_the_jobs_after_it_do_not_start(tmp_path: Path, cache: str) -> None:
    fault = Fault(r'os\.write .*"step": 23, "tokens"', signal.SIGTERM)
    code, said = run(tmp_path, *COMMAND, "seed=0,1", cache, fault=fault)
    assert code == 143, said
    assert state(tmp_path) == ("finished", None, STEPS)


@pytest.mark.slow
def test_a_resumed_run_may_be_watched(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    watched = (*COMMAND, cache, "probe=activations", "probe.norm_output_rms.every_steps=5")
    assert run(tmp_path, *watched, fault=killed_at(WRITES_STEP_11))[0] == -signal.SIGKILL
    assert run(tmp_path, *watched)[0] == 0
    assert_same(tmp_path, undisturbed)
    rows = read_journal(the_run(tmp_path) / "metrics.jsonl")
    seen = [row["step"] for row in rows if row.get("probe") == "norm_output_rms"]
    assert seen == list(range(0, STEPS, 5))


@pytest.mark.slow
def test_checkpoints_and_validation_at_other_steps_change_no_bit(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    other = (*COMMAND, cache, "checkpoint.every_steps=3", "validation.every_steps=0")
    assert run(tmp_path, *other, fault=killed_at(WRITES_STEP_11))[0] == -signal.SIGKILL
    assert run(tmp_path, *other)[0] == 0
    trained = [row for row in losses(undisturbed) if "loss" in row]
    assert losses(tmp_path) == [*trained, losses(undisturbed)[-1]]


@pytest.mark.slow
def test_mlflow_has_one_run_with_every_step_once(tmp_path: Path, cache: str, uri: str) -> None:
    from mxstudy.tracking.mlflow_store import connect

    tracked = (*COMMAND, cache, "tracking=mlflow", f"tracking.uri={uri}")
    fault = killed_at(r"os\.rename .*/\.mirror\.json", count=2)  # the MLflow run exists, with some of the steps
    assert run(tmp_path, *tracked, fault=fault)[0] == -signal.SIGKILL
    code, said = run(tmp_path, *tracked)
    assert code == 0, said
    client = connect(uri)
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert found.info.status == "FINISHED"
    sent = {
        name: [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, name)]
        for name in ("train/loss", "val/loss")
    }
    for name, key in {"train/loss": "loss", "val/loss": "validation_loss"}.items():
        assert sorted(sent[name]) == [(row["step"], row[key]) for row in losses(tmp_path) if key in row]
    assert RunFolder(the_run(tmp_path)).status().mlflow_run_id == found.info.run_id


@pytest.mark.slow
def test_a_second_process_leaves_a_running_run_alone(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    def files() -> dict[Path, bytes]:
        """Return what the run has written. Whoever asks for it joins it, whoever trains it."""
        found = (path for path in the_run(tmp_path).rglob("*") if path.is_file() and path.name != memberships.NAME)
        return {path: path.read_bytes() for path in found}

    with started(tmp_path, *COMMAND, cache, fault=Fault(WRITES_STEP_11, signal.SIGSTOP)) as first:
        process, deadline_s = psutil.Process(first.process.pid), time.monotonic() + 60
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline_s:
            time.sleep(0.01)
        before = files()
        for again in ([], ["rerun=true"], ["validation.every_steps=1"]):
            code, said = run(tmp_path, *COMMAND, cache, *again)
            assert code == 1, said
            assert "left alone: another process runs it" in said
            assert files() == before, again
        process.send_signal(signal.SIGCONT)
        assert first.ended() == 0, first.said
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_run_that_diverges_is_a_result_which_keeps_everything(tmp_path: Path, cache: str) -> None:
    absurd = (*COMMAND, cache, "optimizer.lr=1e20", "checkpoint.every_steps=1")
    code, said = run(tmp_path, *absurd)
    assert code == 0, said
    name, _, step = state(tmp_path)
    assert name == "diverged"
    rows = [json.loads(line) for line in (the_run(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    *_, last = (row for row in rows if "loss" in row)
    assert last["step"] == step
    assert not (torch.tensor([last["loss"], last["grad_norm"]]).isfinite().all())
    newest = max((the_run(tmp_path) / "checkpoints").iterdir())
    assert newest.name == f"step_{step:08d}"
    (tensors,) = newest.glob("*.safetensors")
    assert all(tensor.isfinite().all() for tensor in load_file(tensors).values())
    code, said = run(tmp_path, *absurd)
    assert code == 0, said
    assert "skipped: diverged" in said


@pytest.mark.slow
def test_a_divergence_needs_no_disk_for_a_checkpoint_that_is_there(tmp_path: Path, cache: str) -> None:
    absurd = (*COMMAND, cache, "optimizer.lr=1e20", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    assert run(tmp_path / "roomy", *absurd)[0] == 0
    end = ended, _, step = state(tmp_path / "roomy")
    assert ended == "diverged"
    name = f"step_{step:08d}"
    fault = Fault(rf"os\.rename .*/\.{name}\.\d+',", errno=errno.ENOSPC, count=2)
    code, said = run(tmp_path / "full", *absurd, fault=fault)
    assert code == 0, said
    assert state(tmp_path / "full") == end
    assert [path.name for path in (the_run(tmp_path / "full") / "checkpoints").iterdir()] == [name]
