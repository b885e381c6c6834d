from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from fake_study import FakeStudy, seeds

from mxstudy.config import Slurm
from mxstudy.launch import remote
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.launch.ticket import Ticket
from mxstudy.studies import MODULES
from mxstudy.tracking.folder import RunFolder


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> FakeStudy:
    fake = FakeStudy()
    monkeypatch.setitem(sys.modules, "fake_study_module", SimpleNamespace(STUDY=fake))
    monkeypatch.setitem(MODULES, "pretrain", "fake_study_module")
    return fake


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Slurm, list[str]]]:
    """Return what reaches Slurm, in place of submitit. Jobs are 100, 101, ..."""
    sent: list[tuple[Slurm, list[str]]] = []

    def submit(folders, settings, launch, code, tasks):
        assert (launch.parent.parent / "quick").is_dir()  # beside its runs
        sent.append((settings, [folder.path.name for folder in folders]))
        return ((f"{100 + n}", "LOG") for n, _ in enumerate(folders))

    monkeypatch.setitem(remote.SUBMIT, Slurm, submit)
    return sent


@pytest.fixture
def runs(tmp_path: Path, study: FakeStudy, slurm: FakeSlurm) -> dict[str, RunFolder]:
    """Return runs by name, as jobs 1_0, 1_1, ..., of which three are still in the queue."""
    states = ["queued", "running", "requeued", "dead", "failed", "stopped", "finished"]
    made = {}
    for number, (name, job) in enumerate(zip(states, plan(seeds(tmp_path / "runs", *range(len(states)))), strict=True)):
        folder = made[name] = claim(job)
        settings, job_id, cwd = Slurm(partition="gpu", time_min=60), f"1_{number}", str(tmp_path)
        ticket = Ticket(settings=settings, job_id=job_id, launch="/l", log=f"/l/{number}", submitted_s=0.0, cwd=cwd)
        ticket.write(folder)
    slurm.queue(job1_0="PENDING", job1_1="RUNNING", job1_2="PENDING")
    for name in ("running", "dead"):
        made[name].update(state="running", step=30, steps=100)
    made["requeued"].update(state="preempted", reason="SIGUSR2", step=50, steps=100)
    made["stopped"].update(state="preempted", reason="SIGTERM", step=70, steps=100)
    made["failed"].update(state="failed", reason="ValueError: no", step=5, steps=100)
    made["finished"].update(state="finished", step=100, steps=100)
    rows = [{"step": n, "loss": 5 - n / 100, "tokens_per_s": 1234.5, "time_s": 1000 + 2 * n} for n in range(20, 30)]
    made["running"].journal_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made
