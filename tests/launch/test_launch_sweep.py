"""A launch tells MLflow about its sweep."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_study import FakeStudy, composed, seeds

from mxstudy.launch import conclude, inline, parents, sweep
from mxstudy.launch.plan import plan
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Sweep
from mxstudy.train.signals import Leave

URI = "sqlite:///mlflow.db"


class Store:
    """Replaces MLflow, and keeps what began and ended there by a sweep's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        self.begun: list[str] = []
        self.ended: dict[str, tuple[str, str]] = {}
        monkeypatch.setattr(parents, "create_store", lambda uri: "away" if self.away else None)
        monkeypatch.setattr(Sweep, "begin", lambda each: self.begin(each))
        monkeypatch.setattr(Sweep, "end", lambda each, state, summary: self.end(each, state, summary.markdown))
        monkeypatch.setattr(conclude, "mirror_of", lambda *of: None)

    def begin(self, each: Sweep) -> str:
        self.begun.append(each.name)
        return f"parent of {each.name}"

    def end(self, each: Sweep, state: str, markdown: str) -> None:
        if self.away:
            raise ConnectionError("nobody there")
        self.ended[each.name] = state, markdown


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def tracked(runs: Path, *numbers: int, **values: Any) -> list[Any]:
    return plan(seeds(runs, *numbers, tracking={"uri": URI}, **values))


def test_a_sweep_is_named_after_what_varies_and_tagged_with_what_does_not(tmp_path: Path, study: FakeStudy) -> None:
    jobs = plan(
        [
            composed(tmp_path, f"norm={norm}", f"seed={seed}", "rerun=false", seed=seed, tracking={"uri": URI})
            for norm, seed in (("rmsnorm", 0), ("mxnorm_p2", 1), ("rmsnorm", 2))
        ]
    )
    jobs[1].choices["norm"] = "mxnorm_p2"
    (found,) = sweep.sweeps(jobs)
    assert (found.uri, found.experiment, found.name) == (URI, "quick", "quick: norm, seed")
    assert found.tags == {"experiment": "quick", "study": "pretrain"}
    assert found.folders == {job.fingerprint: RunFolder(job.folder) for job in jobs}
    named = [dataclasses.replace(job, choices=job.choices | {"sweep": "three_norms"}) for job in jobs]
    assert sweep.sweeps(named)[0].name == "three_norms: norm, seed"
    words = ("precision=bf16", "train.steps=5", "probe=all")
    longer = [dataclasses.replace(job, overrides=(*job.overrides, *words)) for job in named]
    assert sweep.sweeps(longer)[0].name == "three_norms: norm, seed; precision=bf16 train.steps=5"


def test_one_job_and_untracked_jobs_have_no_parent(tmp_path: Path, study: FakeStudy) -> None:
    assert sweep.sweeps(tracked(tmp_path, 1)) == []
    assert sweep.sweeps(plan(seeds(tmp_path, 1, 2))) == []
    two = tracked(tmp_path, 1, 2) + tracked(tmp_path, 3, experiment="other")
    assert [each.name for each in sweep.sweeps(two)] == ["quick: seed"]


@pytest.mark.integration
def test_no_job_waits_for_the_parent_and_folders_are_told_of_it_when_it_is_there(
    tmp_path: Path, study: FakeStudy, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_runs, known = threading.Event(), list[str | None]()

    def slow(uri: str) -> None:
        assert first_runs.wait(30)

    def begin(folder: RunFolder) -> str:
        known.append(folder.status().mlflow_parent_id)
        first_runs.set()
        return look(folder)

    def look(folder: RunFolder) -> str:
        deadline_s = time.monotonic() + 30
        while folder.status().mlflow_parent_id is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        known.append(folder.status().mlflow_parent_id)
        return "finished"

    monkeypatch.setattr(parents, "create_store", slow)
    study.outcomes |= {"seed=1": begin, "seed=2": look}
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 0
    assert known == [None, *["parent of quick: seed"] * 2]
    assert store.ended == {"quick: seed": ("finished", "2 arms")}


@pytest.mark.integration
def test_what_is_skipped_is_summed_up_for_the_parent_again(tmp_path: Path, study: FakeStudy, store: Store) -> None:
    inline.run_jobs(tracked(tmp_path, 1, 2))
    store.ended.clear()
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 0
    assert store.begun == ["quick: seed"] * 2
    assert store.ended == {"quick: seed": ("finished", "2 arms")}


def test_a_failure_is_in_the_summary(tmp_path: Path, study: FakeStudy, store: Store) -> None:
    study.outcomes |= {"seed=1": lambda folder: "failed", "seed=2": lambda folder: "diverged"}
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 1
    assert store.ended == {"quick: seed": ("failed", "1 arms\n\nNot done:\n\n- failed: seed=1")}


def test_what_fails_at_the_end_leaves_the_runs_complete_and_closes_the_parent(
    tmp_path: Path,
    study: FakeStudy,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("figures").touch()
    monkeypatch.setattr(study, "summarise", lambda *about: Path("figures/rehearsals").mkdir(parents=True))
    assert inline.run_jobs(tracked(tmp_path / "runs", 1, 2)) == 0
    assert store.ended == {"quick: seed": ("finished", "")}
    why = "NotADirectoryError: Not a directory: figures/rehearsals"
    line = f"all 2 runs of pretrain are complete, but could not be summed up or drawn ({why}); run the same command"
    said = capsys.readouterr()
    assert line in said.out
    assert "Traceback" not in said.err


def test_a_fault_of_a_summary_shows_its_place(
    tmp_path: Path,
    study: FakeStudy,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(study, "summarise", lambda runs, baseline: baseline["missing"])
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 0
    said = capsys.readouterr()
    assert "all 2 runs of pretrain are complete, but could not be summed up or drawn (KeyError: 'missing')" in said.out
    assert "Traceback" in said.err
    assert __file__ in said.err


@pytest.mark.parametrize("caught", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_figures_are_drawn_closes_the_parent(
    caught: signal.Signals,
    tmp_path: Path,
    study: FakeStudy,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(study, "summarise", lambda *about: signal.raise_signal(caught))
        assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 128 + caught
    assert store.ended == {"quick: seed": ("preempted", "")}
    line = f"stopped by {caught.name} after the last job; the same command, run again, does the rest"
    assert line in capsys.readouterr().out
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 0
    assert store.ended == {"quick: seed": ("finished", "2 arms")}


def test_a_signal_leaves_the_sweep_preempted_and_a_resumed_job_its_parent(
    tmp_path: Path, study: FakeStudy, store: Store
) -> None:
    store.away = True
    study.outcomes["seed=1"] = lambda folder: "preempted"
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 143
    assert (store.begun, store.ended) == ([], {})
    store.away = False
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 143
    state, markdown = store.ended["quick: seed"]
    assert state == "preempted"
    assert markdown.splitlines()[-2:] == ["- preempted: seed=1", "- new: seed=2"]
    (job, _) = tracked(tmp_path, 1, 2)
    assert RunFolder(job.folder).status().mlflow_parent_id == "parent of quick: seed"


def test_a_server_that_is_away_is_a_line_at_the_start_and_one_at_the_end(
    tmp_path: Path, study: FakeStudy, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.away = True
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tracking: ")]
    assert said == [
        "tracking: away; the runs continue with their journals only",
        f"tracking: {URI}: ConnectionError: nobody there; run the same command again to repair it",
    ]


def test_a_sweep_with_jobs_that_never_began_has_not_finished(tmp_path: Path, study: FakeStudy, store: Store) -> None:
    def end_too_late(folder: RunFolder) -> str:
        with Leave():
            os.kill(os.getpid(), signal.SIGTERM)
        return "finished"

    study.outcomes["seed=1"] = end_too_late
    assert inline.run_jobs(tracked(tmp_path, 1, 2)) == 143
    assert store.ended["quick: seed"] == ("preempted", "\n\nNot done:\n\n- new: seed=2")
