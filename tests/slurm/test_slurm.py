"""Sweeps on a real Slurm are submitted, preempted, killed and cancelled, and have the losses of undisturbed runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import NODES, Cluster
from commands import OWN_TEXT, SMALL, call, corpus, run_here

from mxstudy.config import Slurm
from mxstudy.launch import slurm as launcher
from mxstudy.launch.freeze import PACKAGE
from mxstudy.launch.queues import Queues
from mxstudy.launch.run_state import ENDED, RunState, observe
from mxstudy.launch.ticket import ticket_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal, read_rows

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STEPS, EVERY = 600, 20
ON_SLURM = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.time_min=10")


class Sweep:
    """The same small training, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words = [*SMALL, *OWN_TEXT, corpus(folder), f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}"]

    def submit(self, *words: str) -> list[RunFolder]:
        """Submit it, and return the runs by seed."""
        run_here(self.folder, *self.words, *ON_SLURM, *words)
        return sorted(find_runs(self.folder / "runs"), key=lambda folder: folder.config().seed)


@pytest.fixture
def sweep(tmp_path: Path, cluster: Cluster) -> Sweep:
    return Sweep(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Return the losses by seed of runs that nobody disturbs, in this process."""
    known: dict[int, list[float]] = {}

    def of(seed: int) -> list[float]:
        if seed not in known:
            folder = tmp_path_factory.mktemp(f"undisturbed-{seed}")
            run_here(folder, *Sweep(folder).words, f"seed={seed}")
            known[seed] = losses(find_runs(folder / "runs")[0])
            assert len(known[seed]) == STEPS
        return known[seed]

    return of


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in read_journal(run.journal_path) if "loss" in row]


def resumed_from(run: RunFolder) -> list[int]:
    rows = read_rows(run.journal_path)[0] if run.journal_path.exists() else []
    return [row["resumed_from"] for row in rows if "resumed_from" in row]


def done_before(run: RunFolder, number: int) -> int:
    """Return how many steps had been done when the run was resumed for the `number`-th time."""
    rows = read_rows(run.journal_path)[0]
    at = [n for n, row in enumerate(rows) if "resumed_from" in row][number]
    return 1 + max(row["step"] for row in rows[:at] if "loss" in row)


def job_of(run: RunFolder) -> str:
    ticket = ticket_of(run)
    assert ticket is not None
    return ticket.job_id


def until(is_so: Callable[[], Any], timeout_s: float = 240) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, "it has taken too long"
        time.sleep(0.1)


def until_step(run: RunFolder, step: int) -> None:
    until(lambda: run.status().step >= step or run.status().state in ENDED)
    assert run.status().state == "running"


def until_over(run: RunFolder, timeout_s: float = 240) -> RunState:
    until(lambda: not observe(run, Queues()).in_flight, timeout_s)
    return observe(run, Queues())


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_sweep_is_submitted_once_and_waited_for(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    runs = sweep.submit("seed=0,1", "train.steps=6", "hydra.launcher.sbatch=[--hold]")
    said = capsys.readouterr().out
    for run in runs:
        named = f"{job_of(run)}  bf16 rmsnorm seed={run.config().seed}  {run.path.name}"
        assert f"{named}  {run.path.relative_to(sweep.folder)}" in said
    assert "2 of 2 jobs submitted" in said
    assert [observe(run, Queues()).state for run in runs] == ["queued", "queued"]
    jobs = [job_of(run) for run in runs]
    three = sweep.submit("seed=0,1,2", "train.steps=6")
    assert "1 of 3 jobs submitted" in capsys.readouterr().out
    assert [job_of(run) for run in three[:2]] == jobs
    slurm("scontrol", "release", jobs[0].partition("_")[0])
    sweep.submit("seed=0,1,2", "train.steps=6", "wait=true")
    said = capsys.readouterr().out
    assert "3 finished" in said
    assert "val loss" in said
    for run in three:
        assert run.status().state == "finished"
    sweep.submit("seed=0,1,2", "train.steps=6")
    assert "jobs submitted" not in capsys.readouterr().out


def test_a_queued_job_runs_what_was_submitted(sweep: Sweep) -> None:
    """Meanwhile its experiment is edited, and other code lies where it starts."""
    (sweep.folder / "conf/experiment").mkdir(parents=True)
    mine = sweep.folder / "conf/experiment/mine.yaml"
    mine.write_text("# @package _global_\ndefaults: [quickstart, _self_]\noptimizer: {lr: 1e-3}\n")
    sweep.words = [f"--config-dir={sweep.folder}/conf", "+experiment=mine", *sweep.words[1:]]
    (run,) = sweep.submit("train.steps=6", "hydra.launcher.sbatch=[--hold]")
    mine.write_text("# @package _global_\ndefaults: [quickstart, _self_]\noptimizer: {lr: 77}\n")
    (sweep.folder / "mxstudy").mkdir()
    (sweep.folder / "mxstudy/__init__.py").write_text("raise RuntimeError('not this one')")
    slurm("scontrol", "release", job_of(run))
    assert until_over(run).state == "finished"
    rates = {row["lr"] for row in read_journal(run.journal_path) if "lr" in row}
    assert max(rates) <= 1e-3


@pytest.mark.parametrize(
    ("disturb", "most_redone"),
    [
        (["scontrol", "requeue"], EVERY),
        (["scancel", "--signal=USR2"], 0),
    ],
    ids=["requeued", "told by SIGUSR2"],
)
def test_what_is_preempted_goes_on(
    sweep: Sweep, undisturbed: Callable[[int], list[float]], disturb: list[str], most_redone: int
) -> None:
    one, other = sweep.submit("seed=0,1")
    until_step(one, 50)
    slurm(*disturb, job_of(one))
    until(lambda: resumed_from(one))
    assert until_over(one).state == until_over(other).state == "finished"
    assert done_before(one, 0) - resumed_from(one)[0] <= most_redone
    assert resumed_from(one)[0] >= 50 - EVERY
    assert (losses(one), losses(other)) == (undisturbed(0), undisturbed(1))


def test_a_job_of_higher_priority_takes_the_nodes_and_gives_them_back(
    sweep: Sweep, undisturbed: Callable[[int], list[float]]
) -> None:
    (run,) = sweep.submit("seed=0")
    until_step(run, 50)
    slurm("srun", "--partition=urgent", "--nodes=4", "--exclusive", "true")
    assert until_over(run).state == "finished"
    assert resumed_from(run)
    assert losses(run) == undisturbed(0)


def test_a_node_that_fails_costs_at_most_the_checkpoint_interval(
    sweep: Sweep, undisturbed: Callable[[int], list[float]]
) -> None:
    (run,) = sweep.submit("seed=0")
    until_step(run, 50)
    node = slurm("squeue", "--noheader", "--jobs", job_of(run), "--format=%N").strip()
    try:
        slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        until(lambda: resumed_from(run))
    finally:  # a node that answers may have come back by itself, and then this is refused
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
    assert until_over(run).state == "finished"
    assert done_before(run, 0) - resumed_from(run)[0] <= EVERY
    assert losses(run) == undisturbed(0)


@pytest.mark.usefixtures("cluster")
def test_a_time_limit_is_an_interruption(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slurm's shortest limit is a minute. The warning comes after 25 to 35 s.

    The training takes about 75 s at the pace that was measured, so that it outlasts the warning even at twice the pace.
    """
    alone = Sweep(tmp_path_factory.mktemp("alone"))
    run_here(alone.folder, *alone.words)
    (run,) = find_runs(alone.folder / "runs")
    first, *_, last = [row for row in read_journal(run.journal_path) if row.get("step", 0) >= STEPS // 2]
    steps = int(75 * (last["step"] - first["step"]) / (last["time_s"] - first["time_s"]))
    run_here(alone.folder, *alone.words, f"train.steps={steps}", "runs_dir=long")
    (undisturbed,) = find_runs(alone.folder / "long")

    sweep = Sweep(tmp_path_factory.mktemp("limited"))
    limits = ("hydra.launcher.time_min=1", "hydra.launcher.signal_delay_s=25")
    (run,) = sweep.submit(f"train.steps={steps}", *limits)
    assert until_over(run, timeout_s=480).state == "finished"
    assert resumed_from(run)
    for number, step in enumerate(resumed_from(run)):
        assert done_before(run, number) == step  # no step is done again
    assert losses(run) == losses(undisturbed)


def test_a_warning_that_comes_too_early_costs_a_turn_and_no_more(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning comes while Python is still starting, before anybody has set a handler."""
    (tmp_path / "sitecustomize.py").write_text(START_SLOWLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (run,) = sweep.submit("seed=0", "train.steps=6")
    until((tmp_path / "starting").exists)
    slurm("scancel", "--signal=USR2", job_of(run))
    until(lambda: "Restarts=1 " in slurm("scontrol", "-o", "show", "job", job_of(run)))
    (tmp_path / "go").touch()
    assert until_over(run).state == "finished"
    assert "Restarts=1 " in slurm("scontrol", "-o", "show", "job", job_of(run))


def test_a_sigterm_without_a_preemption_is_no_reason_for_a_next_turn(sweep: Sweep) -> None:
    """It may come from srun, which ends what a dead task has left behind."""
    (run,) = sweep.submit("seed=0")
    until_step(run, 50)
    slurm("scancel", "--signal=TERM", job_of(run))
    assert until_over(run).state == "preempted"
    assert call("+launch=retry", f"runs_dir={sweep.folder}/runs", "wait=true") == (0, "")
    assert done_before(run, 0) == resumed_from(run)[0]


def test_a_task_that_is_killed_is_seen_as_failed_and_goes_on_from_its_checkpoint(
    sweep: Sweep, undisturbed: Callable[[int], list[float]]
) -> None:
    (run,) = sweep.submit("seed=0")
    until_step(run, 50)
    os.kill(run.status().pid or 0, signal.SIGKILL)
    seen = until_over(run)
    assert run.status().state == "running"  # its last status
    assert seen.state == "failed"
    assert (seen.reason or "").startswith("died without a message (FAILED, exit code ")
    assert call("+launch=retry", f"runs_dir={sweep.folder}/runs", "wait=true") == (0, "")
    assert done_before(run, 0) - resumed_from(run)[0] <= EVERY
    assert losses(run) == undisturbed(0)


def test_a_job_that_is_cancelled_by_hand_has_saved(sweep: Sweep, undisturbed: Callable[[int], list[float]]) -> None:
    (run,) = sweep.submit("seed=0")
    until_step(run, 50)
    slurm("scancel", job_of(run))
    assert until_over(run).state == "preempted"
    time.sleep(7)  # longer than a requeued job would wait
    assert not observe(run, Queues()).in_flight
    sweep.submit("seed=0", "wait=true")
    assert done_before(run, 0) == resumed_from(run)[0]
    assert losses(run) == undisturbed(0)


def test_cancel_ends_what_runs_and_what_waits(
    sweep: Sweep, undisturbed: Callable[[int], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = sweep.submit("seed=0,1", "hydra.launcher.array_parallelism=1")
    until_step(one, 50)
    assert observe(other, Queues()).state == "queued"
    assert call("+launch=cancel", f"runs_dir={sweep.folder}/runs") == (0, "")
    assert until_over(one).state == until_over(other).state == "cancelled"
    until(lambda: one.status().state == "cancelled")
    capsys.readouterr()
    assert call("+launch=retry", f"runs_dir={sweep.folder}/runs") == (0, "")
    assert "0 of 2 runs submitted again" in capsys.readouterr().out
    sweep.submit("seed=0,1", "wait=true")
    assert done_before(one, 0) == resumed_from(one)[0]
    assert (losses(one), losses(other)) == (undisturbed(0), undisturbed(1))


def test_what_a_study_raises_is_slurms_failure_too(sweep: Sweep) -> None:
    """The text is too large to be read when the job is planned, so the study finds that it is too short."""
    for path in (sweep.folder / "corpus").iterdir():
        path.write_text(path.read_text() * 200)
    (run,) = sweep.submit("validation.sequences=100000")
    seen = until_over(run)
    assert (seen.state, run.status().state) == ("failed", "failed")
    assert "validation.sequences" in (run.status().reason or "")
    until(lambda: "JobState=FAILED" in slurm("scontrol", "-o", "show", "job", job_of(run)), timeout_s=20)


def test_tasks_find_each_other(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two tasks do an all-reduce over gloo, started by the launcher's own script.

    The job is submitted under torchrun.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    launch = tmp_path / "launch"
    launch.mkdir()
    code = tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(MEET)
    (code / "mxstudy").symlink_to(PACKAGE)
    runs = [RunFolder(tmp_path / name) for name in ("a", "b")]
    settings = Slurm(nodes=2, gpus_per_node=0, time_min=5)
    for run in runs:
        run.path.mkdir()
    jobs = [job_id for job_id, _ in launcher.submit(runs, settings, launch, code, tasks=2)]
    until(lambda: len(list(tmp_path.glob("[ab]/*"))) == 8)
    for run, job in zip(runs, jobs, strict=True):
        said = [path.read_text().split() for path in sorted(run.path.iterdir())]
        assert [(rank, world, local, total) for rank, world, local, _, total in said] == [
            ("0", "4", "0", "6.0"),
            ("1", "4", "1", "6.0"),
            ("2", "4", "0", "6.0"),
            ("3", "4", "1", "6.0"),
        ]
        (address,) = {host for *_, host, _ in said}
        assert address in NODES
        until(lambda job=job: not slurm("squeue", "--noheader", "--jobs", job).strip())


# Lets a job's tasks wait at their start until the test lets them go.
START_SLOWLY = """
import os, pathlib, time
if "SLURM_PROCID" in os.environ:
    here = pathlib.Path(__file__).parent
    (here / "starting").touch()
    while not (here / "go").exists():
        time.sleep(0.05)
"""

# Replaces `work` in a job's tasks, and prints what a process group would be made from, and the sum of all ranks.
MEET = """
import os
if "SLURM_PROCID" in os.environ and os.environ.get("SUBMITIT_EXECUTOR"):
    import importlib.abc, sys
    def meet(folder):
        import torch, torch.distributed as group
        from mxstudy.train.process_group import find_rank, met
        place = find_rank(os.environ)
        with met():
            total = torch.tensor(float(group.get_rank()))
            group.all_reduce(total)
        words = [str(word) for word in (place.rank, place.size, place.local_rank, place.address, total.item())]
        (folder.path / words[0]).write_text(" ".join(words))
        return "finished"
    import mxstudy.launch.worker as worker
    worker.work = meet
"""
