"""A run of several sweeps is stored once, found from each, and trained again for all of them."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import call
from fake_study import FakeStudy, existing, seeds

from mxstudy import results
from mxstudy.launch import inline
from mxstudy.launch.claiming import claim, set_aside
from mxstudy.launch.composed import Composed
from mxstudy.launch.plan import plan
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder, RunLocked

PROBE = {"norm_output_rms": {"every_steps": 5}}


def asked(runs: Path, sweep: str, *numbers: int, **values: Any) -> list[Composed]:
    """Return jobs of a sweep whose experiment has its name, and that has its own name for the seed.

    The label of a job alone also has its norm.
    """
    found = seeds(runs, *numbers, experiment=sweep, baseline={"norm": sweep}, **values)
    return [
        Composed((f"{sweep}.seed={n}",), job.choices | {"sweep": sweep, sweep: str(n)}, job.values)
        for n, job in zip(numbers, found, strict=True)
    ]


def labels(runs: Path, name: str) -> list[str]:
    return sorted(results.load([runs / name], "runs")["label"])


def test_a_sweep_finds_its_runs_whoever_trained_them(tmp_path: Path, study: FakeStudy) -> None:
    assert inline.run_jobs(plan(asked(tmp_path, "first", 1, 2))) == 0
    assert inline.run_jobs(plan(asked(tmp_path, "second", 1, 2))) == 0
    assert inline.run_jobs(plan(asked(tmp_path, "third", 2, 3))) == 0
    assert study.ran == ["first.seed=1", "first.seed=2", "third.seed=3"]
    assert len(list(tmp_path.glob("*/*/memberships.json"))) == 2  # one for each of several
    assert not (tmp_path / "second").exists()
    assert labels(tmp_path, "first") == ["first.seed=1", "first.seed=2"]
    assert labels(tmp_path, "second") == ["second.seed=1", "second.seed=2"]
    assert labels(tmp_path, "third") == ["third.seed=2", "third.seed=3"]
    assert labels(tmp_path, "") == ["first.seed=1", "first.seed=2", "third.seed=3"]
    runs = results.load([tmp_path / "third"], "runs").set_index("label")
    assert list(runs["choice.third"]) == ["2", "3"]
    assert set(runs["config.experiment"]) == set(runs["config.baseline.norm"]) == {"third"}
    assert "choice.first" not in runs
    (own,) = results.folders_of([runs.loc["third.seed=2", "folder"]])
    assert own.label == "first.seed=2"
    with pytest.raises(ConfigError, match="fourth: has no runs; give a run's folder, runs/ or runs/NAME of an experim"):
        results.folders_of([tmp_path / "fourth"])


def test_a_name_of_a_sweep_does_not_find_other_sweeps_of_its_experiment(tmp_path: Path, study: FakeStudy) -> None:
    inline.run_jobs(plan(asked(tmp_path, "first", 1, 2)))
    other = [replace(one, choices=one.choices | {"sweep": "short"}) for one in asked(tmp_path, "first", 2, 3)]
    assert inline.run_jobs(plan(other)) == 0
    assert labels(tmp_path, "short") == ["first.seed=2", "first.seed=3"]
    assert labels(tmp_path, "first") == ["first.seed=1", "first.seed=2"]
    by_hand = [replace(one, choices={"experiment": "first"}) for one in asked(tmp_path, "first", 3, 4)]
    assert inline.run_jobs(plan(by_hand)) == 0
    assert labels(tmp_path, "first") == [f"first.seed={n}" for n in (1, 2, 3, 4)]


def test_what_another_process_runs_or_has_failed_is_joined_too(tmp_path: Path, study: FakeStudy) -> None:
    running = existing(plan(asked(tmp_path, "first", 1)), state="running", host=socket.gethostname())
    existing(plan(asked(tmp_path, "first", 2)), state="failed")
    with running.lock():
        assert inline.run_jobs(plan(asked(tmp_path, "second", 1, 2, 3))) == 1
    assert labels(tmp_path, "second") == [f"second.seed={n}" for n in (1, 2, 3)]


def test_planning_and_a_dry_run_write_nothing(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(asked(tmp_path, "first", 1)), state="finished")
    plan(asked(tmp_path, "second", 1))
    assert [each.sweep for each in folder.memberships()] == ["first"]


def test_a_summary_has_the_sweep_s_own_labels_and_choices(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline.run_jobs(plan(asked(tmp_path, "first", 1, 2)))
    seen: list[RunFolder] = []
    monkeypatch.setattr(study, "summarise", lambda arms, baseline: seen.extend(arms.values()) or _nothing())
    inline.run_jobs(plan(asked(tmp_path, "second", 1, 2)))
    assert [each.membership().choices["second"] for each in seen] == ["1", "2"]


def _nothing() -> Any:
    from mxstudy.tracking.mlflow_parent import Summary

    return Summary("")


def test_status_finds_the_runs_of_each_sweep(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    inline.run_jobs(plan(asked(tmp_path, "first", 1, 2)))
    inline.run_jobs(plan(asked(tmp_path, "second", 2, 3)))
    capsys.readouterr()

    def shown(*arguments: str) -> list[str]:
        assert call("+launch=status", f"runs_dir={tmp_path}", *arguments) == (0, "")
        return sorted(re.findall(r"seed=(\d)|$", line)[0] for line in capsys.readouterr().out.splitlines()[1:-1])

    assert shown("+sweep=first") == ["1", "2"]
    assert shown("+experiment=second") == ["2", "3"]
    assert shown("+sweep=first,second") == ["1", "2", "3"]
    assert call("+launch=status", f"runs_dir={tmp_path}", "+sweep=third")[1].startswith("sweep: no run in")


# ------------------------------------------------------------------------------------------------ trained again


@pytest.mark.integration
def test_a_rerun_with_more_probes_replaces_the_run_for_all(tmp_path: Path, study: FakeStudy) -> None:
    inline.run_jobs(plan(asked(tmp_path, "first", 1, 2)))
    inline.run_jobs(plan(asked(tmp_path, "second", 1, 2)))
    with pytest.raises(ConfigError, match=r"probe\.norm_output_rms: was off in .*stale=rerun"):
        plan(asked(tmp_path, "third", 1, 2, probe=PROBE))
    inline.run_jobs(plan(asked(tmp_path, "third", 1, 2, probe=PROBE, rerun=True)))
    folders = results.folders_of([tmp_path])
    assert {(folder.path.parent.name, folder.membership().experiment) for folder in folders} == {("first", "first")}
    assert {path.name.partition(".")[2] for path in folders[0].path.parent.iterdir()} == {"", "old-1"}
    for name in ("first", "second", "third"):
        found = results.folders_of([tmp_path / name])
        assert (found, [each.label for each in found]) == (folders, [f"{name}.seed={n}" for n in (1, 2)])
        assert [job.state for job in plan(asked(tmp_path, name, 1, 2, probe=PROBE))] == ["finished"] * 2
    inline.run_jobs(plan(asked(tmp_path, "second", 1, rerun=True)))  # needs no probe, but removes none
    assert [job.state for job in plan(asked(tmp_path, "third", 1, probe=PROBE))] == ["finished"]


def test_until_it_has_ended_everyone_finds_the_run_that_it_replaces(tmp_path: Path, study: FakeStudy) -> None:
    inline.run_jobs(plan(asked(tmp_path, "first", 1)))
    study.ran.clear()
    (results.folders_of([tmp_path])[0].path / "mark").touch()

    def marked() -> list[bool]:
        places = (tmp_path, tmp_path / "first", tmp_path / "second")
        return [(found.path / "mark").exists() for found in results.folders_of(places)]

    def ends(state: str) -> Callable[[RunFolder], str]:
        return lambda folder: during.append(marked()) or state  # type: ignore[func-returns-value]

    during: list[list[bool]] = []
    study.outcomes["norm=rmsnorm second.seed=1"] = ends("preempted")
    (planned,) = plan(asked(tmp_path, "second", 1, rerun=True))
    assert inline.run_jobs([planned]) == 143
    assert during == [[True] * 3]
    assert marked() == [True] * 3
    study.outcomes["norm=rmsnorm second.seed=1"] = ends("finished")
    (planned,) = plan(asked(tmp_path, "second", 1))  # the same command, without rerun=true
    assert planned.state == "resume"
    assert inline.run_jobs([planned]) == 0
    assert during[1:] == [[True] * 3]
    assert marked() == [False] * 3
    assert study.ran == ["norm=rmsnorm second.seed=1"] * 2


def test_a_run_that_is_taken_while_one_looks_is_not_moved(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(asked(tmp_path, "first", 1)), state="failed")
    (job,) = plan(asked(tmp_path, "first", 1, rerun=True))
    with folder.lock(), pytest.raises(RunLocked, match="is writing to it"):
        claim(job)
    takes: list[Callable[[], None]] = [
        lambda: folder.update(state="running", host="elsewhere", heartbeat_s=9e9),
        lambda: folder.update(state="queued"),
    ]
    real = folder.status
    for take in takes:
        with pytest.MonkeyPatch.context() as patch:

            def lock(self: RunFolder, take: Callable[[], None] = take) -> Any:
                take()  # between the first look and the lock
                return _locked(self)

            patch.setattr(RunFolder, "lock", lock)
            with pytest.raises(RunLocked, match="another process has just taken it"), set_aside(folder):
                pass
        assert folder.path.exists()
        folder.update(state="failed", host=None, heartbeat_s=None)
    assert real().state == "failed"


_locked = RunFolder.lock


def test_a_resumed_run_keeps_the_probes_that_another_sweep_asked_for(tmp_path: Path, study: FakeStudy) -> None:
    existing(plan(asked(tmp_path, "first", 1, probe=PROBE)), state="preempted")
    inline.run_jobs(plan(asked(tmp_path, "second", 1)))
    assert [job.state for job in plan(asked(tmp_path, "first", 1, probe=PROBE))] == ["finished"]
