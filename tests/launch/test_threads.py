"""Processes that share their cores use fewer threads, unless somebody has set how many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from each import each
from fake_study import FakeStudy, seeds

from mxstudy.config import Local
from mxstudy.launch import local, threads
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.launch.threads import capped_threads, threads_of
from mxstudy.train import runtime


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that there are eight cores, for each of which torch starts a thread by default."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    for module in (runtime, threads):
        monkeypatch.setattr(module, "cores", lambda: 8)
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@each(
    ("is_rehearsal", "processes", "number"),
    [(False, 1, None), (True, 1, 1), (True, 4, 1), (False, 2, 4), (False, 3, 2), (False, 9, 1)],
)
def test_a_share_of_the_cores(is_rehearsal: bool, processes: int, number: int | None) -> None:
    found = threads_of(is_rehearsal, processes)
    assert (found.number if found else None) == number


def test_who_has_said_how_many_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of(True, 4) is None


def test_a_rehearsal_says_that_it_has_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with capped_threads(is_rehearsal=False):
        assert (torch.get_num_threads(), capsys.readouterr().out) == (8, "")
    with capped_threads(is_rehearsal=True):
        assert torch.get_num_threads() == 1
    assert capsys.readouterr().out == (
        "threads: 1, because a rehearsal is too small for more; OMP_NUM_THREADS=N sets another number\n"
    )


def test_a_notebook_has_its_threads_again_after_a_rehearsal() -> None:
    with pytest.raises(KeyboardInterrupt), capped_threads(is_rehearsal=True):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 8


def test_processes_that_were_started_together_share_what_they_have_in_common(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cores are shared by the ranks with the same cores: of four, one is on another host and one has its own."""
    monkeypatch.setattr(
        threads, "all_of", lambda mine: [mine, mine, ("elsewhere", mine[1]), (mine[0], [len(mine[1]) + 1])]
    )
    with capped_threads(is_rehearsal=False):
        assert torch.get_num_threads() == 4
    assert "threads: 4, because 2 processes share 8 cores; " in capsys.readouterr().out


def test_jobs_of_a_queue_share_the_cores(tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(DEVNULL=None, Popen=lambda *_, **__: None))  # no queue
    folders = [claim(job) for job in plan(seeds(tmp_path / "runs", 0, 1, 2))]
    two = Local(gpus_per_node=0, array_parallelism=2)
    for settings, tasks, number in (
        (Local(gpus_per_node=0), 1, None),  # one job after the other
        (two, 1, 4),
        (two, 2, 2),
        (replace(two, array_parallelism=99), 1, 2),  # there are three jobs
        (replace(two, cpus_per_task=7), 1, 7),
    ):
        assert len(list(local.submit(folders, settings, tmp_path, tmp_path, tasks))) == 3
        assert json.loads((tmp_path / "jobs.json").read_text())["threads"] == number
