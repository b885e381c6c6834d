"""Jobs of two tasks on two nodes of a real Slurm form a group, and are told to leave, preempted, killed and resumed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cluster import Cluster
from commands import call
from test_slurm import EVERY, Sweep, done_before, job_of, losses, resumed_from, slurm, until, until_over, until_step

from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_rows

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TWO_RUNS_OF_TWO_RANKS = ("seed=0,1", "hydra.launcher.nodes=2", "train.steps=400")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> list[list[float]]:
    """Return the losses by seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        runs = Sweep(tmp_path_factory.mktemp("undisturbed")).submit(*TWO_RUNS_OF_TWO_RANKS, "wait=true")
    assert [ranks_of(run) for run in runs] == [2, 2]
    return [losses(run) for run in runs]


@pytest.fixture
def sweep(tmp_path: Path, undisturbed: list[list[float]]) -> Sweep:
    return Sweep(tmp_path)


def test_one_is_told_to_leave_and_of_another_a_task_is_killed(sweep: Sweep, undisturbed: list[list[float]]) -> None:
    told, killed = sweep.submit(*TWO_RUNS_OF_TWO_RANKS)
    until_step(told, 50)
    slurm("scancel", "--signal=USR2", job_of(told))
    until_step(killed, 50)
    os.kill(pid_of_rank(1, killed), signal.SIGKILL)
    killed_s = time.monotonic()
    seen = until_over(killed)
    assert time.monotonic() - killed_s < 60
    assert seen.state == killed.status().state == "failed"
    assert "rank 1 of 2 ended or froze without an error" in (seen.reason or "")
    assert call("+launch=retry", f"runs_dir={sweep.folder}/runs", "seed=1", "wait=true") == (0, "")
    assert until_over(told).state == "finished"
    assert resumed_from(told) == [done_before(told, 0)]
    assert done_before(killed, 0) - resumed_from(killed)[0] <= EVERY
    assert [losses(told), losses(killed)] == undisturbed


def test_one_is_requeued_and_another_preempted(sweep: Sweep, undisturbed: list[list[float]]) -> None:
    """A job waits in the partition of higher priority, and takes all nodes."""
    requeued, preempted = sweep.submit(*TWO_RUNS_OF_TWO_RANKS)
    until_step(requeued, 50)
    slurm("scontrol", "requeue", job_of(requeued))
    until_step(preempted, 50)
    slurm("srun", "--partition=urgent", "--nodes=4", "--exclusive", "true")
    for run in (requeued, preempted):
        until(lambda run=run: resumed_from(run))
        assert until_over(run).state == "finished"
        assert done_before(run, 0) - resumed_from(run)[0] <= EVERY
    assert [losses(requeued), losses(preempted)] == undisturbed


def ranks_of(run: RunFolder) -> int:
    return next(row["ranks"] for row in read_rows(run.journal_path)[0] if "ranks" in row)


def pid_of_rank(rank: int, run: RunFolder) -> int:
    """Return the pid of that task's first process, which may have started others."""
    array, _, number = job_of(run).partition("_")
    words = {f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={number}", f"SLURM_PROCID={rank}"}
    return min(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if words <= environment(path))


def environment(path: Path) -> set[str]:
    try:
        return set(path.read_text(errors="replace").split("\0"))
    except OSError:  # it has ended
        return set()
