"""A run made by other code is neither skipped nor resumed silently."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from fake_study import FakeStudy, existing, seeds

from mxstudy.launch import inline, sweep
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.reader import ConfigError
from mxstudy.tracking.code import code_of, recorded
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.runtime import planned_for


@functools.cache
def other() -> dict[str, Any]:
    """Return the record of a code that differs in one file, computed once, and not while tests are collected."""
    return recorded(code_of("pretrain")["code_files"] | {"numerics/scales.py": "other"})


def of_other_code(runs: Path, seed: int = 1, state: str = "finished", **about: Any) -> RunFolder:
    folder = existing(plan(seeds(runs, seed)), state=state)
    folder.set_provenance(folder.provenance() | other() | about)
    return folder


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_result_of_other_code_is_refused_with_the_files_before_any_job_starts(
    tmp_path: Path, study: FakeStudy, state: str
) -> None:
    folder = of_other_code(tmp_path, state=state)
    said = (
        r"stale: other code made this run \(mxstudy/numerics/scales\.py\); stale=rerun trains it again, "
        r"stale=ok takes its result as it is"
    )
    with pytest.raises(ConfigError, match=rf"^{said}$"):
        plan(seeds(tmp_path, 1))
    with pytest.raises(ConfigError, match=rf"^1 of 2 jobs cannot run, so none was started:\n  seed=1: {said}$"):
        plan(seeds(tmp_path, 1, 2))
    (taken,) = plan(seeds(tmp_path, 1, stale="ok"))
    assert (taken.state, taken.folder, taken.fingerprint) == (state, folder.path, folder.status().fingerprint)
    for answer in ({"rerun": True}, {"stale": "rerun"}):
        (again,) = plan(seeds(tmp_path, 1, **answer))
        assert (again.state, again.replaces, again.fingerprint) == ("new", folder.path, taken.fingerprint)
    for answer in ("ok", "rerun"):
        with pytest.raises(ConfigError, match=r"^stale: has no effect with rerun=true; leave one of them out"):
            plan(seeds(tmp_path, 1, rerun=True, stale=answer))


def test_the_refusal_counts_the_jobs_whose_runs_are_stale(tmp_path: Path, study: FakeStudy) -> None:
    for seed in (1, 2):
        of_other_code(tmp_path, seed)
    stale = r"stale: other code made this run [^\n]*"
    none = "jobs cannot run, so none was started:"
    with pytest.raises(ConfigError, match=rf"^2 of 2 {none}\n  2 of 2 jobs: {stale}$"):
        plan(seeds(tmp_path, 1, 2))
    study.invalid = {3}
    with pytest.raises(
        ConfigError, match=rf"^3 of 4 {none}\n  2 of 4 jobs: {stale}\n    seed=1\n    seed=2\n  seed=3: [^\n]*$"
    ):
        plan(seeds(tmp_path, 1, 2, 3, 4))


def test_a_sweep_that_was_killed_as_it_trained_again_goes_on(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep that is killed while it trains again can go on.

    Jobs that had not begun used to be refused without rerun=true, and with it finished ones were trained again.
    """
    for seed in (1, 2, 3):
        of_other_code(tmp_path, seed)
    study.outcomes["seed=2"] = lambda folder: "preempted"  # and the third has not begun
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2, 3, rerun=True))) != 0
    del study.outcomes["seed=2"]
    assert "the same command, with stale=rerun in place of rerun=true, continues from" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^1 of 3 jobs cannot run"):
        plan(seeds(tmp_path, 1, 2, 3))
    planned = plan(seeds(tmp_path, 1, 2, 3, 4, stale="rerun"))
    assert [job.state for job in planned] == ["finished", "resume", "new", "new"]
    assert [job.replaces is not None for job in planned] == [False, False, True, False]
    study.ran.clear()
    assert inline.run_jobs(planned) == 0
    assert study.ran == ["seed=2", "seed=3", "seed=4"]
    study.ran.clear()
    again = plan(seeds(tmp_path, 1, 2, 3, 4))
    assert [job.state for job in again] == ["finished"] * 4
    assert inline.run_jobs(planned) == 0  # the earlier plan: what has been trained meanwhile is not trained twice
    assert study.ran == []


def test_stale_rerun_trains_again_what_could_not_be_read_or_has_a_probe_too_few(
    tmp_path: Path, study: FakeStudy
) -> None:
    probe = {"norm_output_rms": {"every_steps": 5}}
    folders = [existing(plan(seeds(tmp_path, seed)), state="finished") for seed in (1, 2)]
    existing(plan(seeds(tmp_path, 3, probe=probe)), state="finished")
    folders[1].config_path.write_text("study: of before")
    planned = plan(seeds(tmp_path, 1, 2, 3, probe=probe, stale="rerun"))
    assert [(job.state, job.replaces) for job in planned[:2]] == [("new", folder.path) for folder in folders]
    assert planned[2].state == "finished"


def test_a_run_that_recorded_its_commit_alone_is_refused_as_well(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    about = {key: value for key, value in folder.provenance().items() if not key.startswith("code")}
    folder.set_provenance(about | {"commit": "a" * 40, "dirty": False})
    with pytest.raises(ConfigError, match=r"\(files unknown: it recorded commit aaaaaaaaaaaa alone\)"):
        plan(seeds(tmp_path, 1))


def test_a_run_is_resumed_by_other_code_only_where_that_is_asked_for(tmp_path: Path, study: FakeStudy) -> None:
    folder = of_other_code(tmp_path, state="preempted")
    assert [job.state for job in plan(seeds(tmp_path, 1))] == ["resume"]  # it begins again: there is no checkpoint
    claim(plan(seeds(tmp_path, 1))[0])
    assert folder.code() == code_of("pretrain")["code"]
    (folder.checkpoints / "step_00000005").mkdir(parents=True)
    folder.set_provenance(folder.provenance() | other())
    with pytest.raises(ConfigError, match=r"stale: .*scales.*stale=ok goes on with today's code"):
        plan(seeds(tmp_path, 1))
    (job,) = plan(seeds(tmp_path, 1, stale="ok"))
    claim(job).update(state="finished")
    assert folder.code() == ", ".join(sorted([code_of("pretrain")["code"], other()["code"]]))
    with pytest.raises(ConfigError, match=r"stale: .*scales"):
        plan(seeds(tmp_path, 1))


def test_a_run_that_would_go_on_from_tables_of_other_code_is_refused(tmp_path: Path, study: FakeStudy) -> None:
    """An evaluation has no checkpoints, but a killed one goes on from its finished tables."""
    folder = of_other_code(tmp_path, state="preempted")
    (folder.path / "tables").mkdir()
    (folder.path / "tables" / "samples_piqa_cf.parquet").touch()
    with pytest.raises(ConfigError, match=r"stale: .*scales.*stale=ok goes on with today's code"):
        plan(seeds(tmp_path, 1))
    (again,) = plan(seeds(tmp_path, 1, stale="rerun"))
    assert (again.state, again.replaces) == ("new", folder.path)
    claim(plan(seeds(tmp_path, 1, stale="ok"))[0])
    assert folder.code() == ", ".join(sorted([code_of("pretrain")["code"], other()["code"]]))


def test_a_run_that_begins_again_twice_is_of_its_last_code_alone(tmp_path: Path, study: FakeStudy) -> None:
    folder = of_other_code(tmp_path, state="preempted")
    folder.set_provenance(folder.provenance() | {"resumed": [other() | {"torch": "2.0.0"}]})
    claim(plan(seeds(tmp_path, 1))[0])
    assert folder.code() == code_of("pretrain")["code"]


def test_who_plans_for_another_machine_compares_no_gpu(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "identity", lambda config: ("cuda", {}))
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    folder.set_provenance(folder.provenance() | {"gpu": "NVIDIA H200"})
    monkeypatch.setattr("mxstudy.launch.stale.provenance", lambda: folder.provenance() | {"gpu": "NVIDIA B200"})
    with pytest.raises(ConfigError, match="GPU NVIDIA H200 then, NVIDIA B200 now"):
        plan(seeds(tmp_path, 1))
    with planned_for(1):
        assert [job.state for job in plan(seeds(tmp_path, 1))] == ["finished"]


def test_a_summary_names_mixed_code(tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    of_other_code(tmp_path)
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2, stale="ok"))) == 0
    said = f"code {other()['code']} in 1 run, {code_of('pretrain')['code']} in 1 run"
    assert f"The runs are of different code ({said})" in capsys.readouterr().out
    summary = sweep.summarise(plan(seeds(tmp_path, 1, 2, stale="ok")))["pretrain"]
    assert said in summary.markdown
    assert "different code" not in sweep.summarise(plan(seeds(tmp_path, 2)))["pretrain"].markdown
