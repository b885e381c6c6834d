"""Jobs have the names and colours of their arms, and so have their runs in MLflow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fake_study import FakeStudy, composed

from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.tracking.mlflow_mirror import mirror_of

URI = {"uri": "sqlite:///mlflow.db"}


def test_a_run_has_the_name_and_the_colour_of_its_arm_in_mlflow(tmp_path: Path, study: FakeStudy) -> None:
    """norm.p=4 once had the name and the tags of p=2."""
    norms = [{"kind": "mxnorm", "p": p} for p in (2.0, 4.0)]
    asked = [composed(tmp_path, f"seed={n}", seed=n, norm=norm, tracking=URI) for norm in norms for n in (0, 1)]
    jobs = plan([dataclasses.replace(one, choices={"norm": "mxnorm_p2"}) for one in asked])
    named = [job.name for job in jobs]
    assert [name.split()[-1] for name in named] == ["seed=0", "seed=1"] * 2
    assert [" p=4" in name for name in named] == [False, False, True, True]
    assert jobs[0].color == jobs[1].color != jobs[2].color == jobs[3].color
    assert [job.name for job in jobs] == [f"{job.arm} seed={job.config.seed}" for job in jobs]
    mirror = mirror_of(jobs[2].config, claim(jobs[2]), jobs[2].label)
    assert mirror is not None
    assert mirror.folder.provenance()["arm"] == jobs[2].arm
    assert (mirror.run_name, mirror.tags["mlflow.runColor"]) == (jobs[2].name, jobs[2].color)


def test_a_runs_name_in_mlflow_says_what_all_jobs_of_its_launch_share(tmp_path: Path, study: FakeStudy) -> None:
    """Two sweeps that differ in that alone had the same names there."""
    norms = [("norm=mxnorm_p1", {"kind": "mxnorm", "p": 1.0}), ("norm=mxnorm_p2", {"kind": "mxnorm", "p": 2.0})]
    shared = ("+sweep=norms", "precision=bf16", "optimizer.lr=2e-3", "probe=all", "runs_dir=x")
    jobs = plan(
        [
            composed(tmp_path, *shared, word, f"seed={n}", norm=norm, optimizer={"lr": 2e-3}, seed=n)
            for word, norm in norms
            for n in (0, 1)
        ]
    )
    assert [job.name for job in jobs] == [f"mxnorm_p{p} seed={n}" for p in (1, 2) for n in (0, 1)]
    assert [job.shown_as for job in jobs] == [f"{job.name} precision=bf16 optimizer.lr=2e-3" for job in jobs]
    seeds = [composed(tmp_path, *shared, f"seed={n}", optimizer={"lr": 2e-3}, seed=n) for n in (0, 1)]
    assert [job.shown_as for job in plan(seeds)] == [f"bf16 rmsnorm seed={n} optimizer.lr=2e-3" for n in (0, 1)]


def test_the_run_of_a_job_alone_also_has_what_its_command_changed_in_its_name(tmp_path: Path, study: FakeStudy) -> None:
    words = ("+experiment=quick", "norm=rmsnorm", "optimizer.lr=2e-3", "seed=3", "probe=all", "tracking=mlflow")
    (job,) = plan([composed(tmp_path, *words, optimizer={"lr": 2e-3}, seed=3, tracking=URI)])
    mirror = mirror_of(job.config, claim(job), job.label)
    assert mirror is not None
    assert mirror.run_name == f"{job.arm} optimizer.lr=2e-3 seed=3"
    assert (job.arm, job.name) == ("bf16 rmsnorm", "bf16 rmsnorm")  # as in a sweep: tables have these
