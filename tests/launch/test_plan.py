"""A plan decides which jobs run, resume, are skipped or are refused."""

from __future__ import annotations

import dataclasses
import json
import shlex
import socket
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import call
from composing import compose_job
from each import each
from fake_study import FakeStudy, composed, existing, seeds, without

from mxstudy.config import Pretrain
from mxstudy.launch import inline, sweep
from mxstudy.launch.claiming import claim, differences, set_aside
from mxstudy.launch.composed import Composed
from mxstudy.launch.plan import plan
from mxstudy.launch.process_pool import MANY, begin_in_processes
from mxstudy.reader import ConfigError, changed
from mxstudy.results import folders_of
from mxstudy.tracking.code import code_of
from mxstudy.tracking.folder import RunFolder, RunLocked
from mxstudy.tracking.memberships import Membership
from mxstudy.tracking.provenance import provenance


def test_new_jobs_live_under_experiment_and_fingerprint_and_nothing_is_written(
    tmp_path: Path, study: FakeStudy
) -> None:
    jobs = plan(seeds(tmp_path / "runs", 1, 2))
    assert [job.label for job in jobs] == ["seed=1", "seed=2"]
    assert [job.state for job in jobs] == ["new", "new"]
    assert all(job.folder == tmp_path / "runs" / "quick" / job.fingerprint[:12] for job in jobs)
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_no_store_can_have_is_refused_with_the_plan(tmp_path: Path, study: FakeStudy) -> None:
    with pytest.raises(ConfigError, match=r"^tracking\.uri: 'ftp://host' does not begin with one of sqlite"):
        plan(seeds(tmp_path, 1, 2, tracking={"uri": "ftp://host"}))


def test_what_all_processes_need_is_there_before_they_begin_and_what_claims_need_when_they_end(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process imported the kind of run again, and the code was digested only after them."""
    done: list[str] = []
    began = begin_in_processes

    def begin(function, items):
        done.append("begun")
        results = began(function, items)
        return lambda: (done.append("awaited"), results())[1]

    monkeypatch.setattr("mxstudy.launch.plan.study_of", lambda kind: (done.append(kind), study)[1])
    monkeypatch.setattr("mxstudy.launch.plan.begin_in_processes", begin)
    monkeypatch.setattr("mxstudy.launch.plan.origin", lambda kind: done.append(f"origin of {kind}"))
    plan(seeds(tmp_path, 1, 2))
    assert done[:3] == ["pretrain", "begun", "awaited"]
    done.clear()
    plan(seeds(tmp_path, *range(MANY)))
    assert done[:4] == ["pretrain", "begun", "origin of pretrain", "awaited"]


def test_one_folder_is_tried_once_for_all_jobs(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr("mxstudy.launch.plan.check_folder", lambda key, path: tried.append(path))
    plan([*seeds(tmp_path / "a", 1, 2, 3), *seeds(tmp_path / "b", 1, 2)])
    assert tried == [tmp_path / "a" / "quick", tmp_path / "b" / "quick"]


def test_one_bad_job_refuses_the_sweep_and_all_bad_jobs_are_listed(tmp_path: Path, study: FakeStudy) -> None:
    study.invalid = {2}
    jobs = seeds(tmp_path, 1, 2, 3, 4)
    jobs[2] = without(jobs[2], "norm=x: no such choice")
    jobs[3].values["train"] = {"stepz": 3}
    with pytest.raises(ConfigError) as caught:
        plan(jobs)
    assert str(caught.value).splitlines() == [
        "3 of 4 jobs cannot run, so none was started:",
        "  seed=2: seed: 2 is unlucky",
        "  seed=3: norm=x: no such choice",
        "  seed=4: train.stepz: no such key; did you mean 'steps'?",
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_all_jobs_share_is_said_once(tmp_path: Path, study: FakeStudy) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(seeds(tmp_path, 1, 2, 3, norm={"kind": "mxnorm", "p": 0}))
    assert str(caught.value) == "norm.p: the exponent of the p-mean must be positive and finite, not 0.0"


@pytest.mark.integration
def test_a_seed_of_more_than_64_bits_is_refused_where_it_is_planned_alone(tmp_path: Path, study: FakeStudy) -> None:
    for key, seed in (("seed", -1), ("data_seed", 2**64)):
        with pytest.raises(ConfigError, match=rf"^{key}: must lie in 0 \.\. 2\*\*64 - 1, not {seed}$"):
            plan([composed(tmp_path, **{key: seed})])
    with pytest.raises(ConfigError, match=r"^seeds: must lie in 0 \.\. 2\*\*64 - 1, not -2$"):
        plan([compose_job("+experiment=student_teacher", "seeds=[1,-2]")])
    (job,) = plan([composed(tmp_path, seed=2**64 - 1)])
    stored = existing([dataclasses.replace(job, config=changed(job.config, seed=-1))], state="finished")
    assert stored.config().seed == -1


def test_a_job_that_is_given_twice_is_not_the_same_run_as_itself(tmp_path: Path, study: FakeStudy) -> None:
    """`+sweep=moe precision=mxfp8` has one arm twice."""
    given = [composed(tmp_path, line, seed=1) for line in ("seed=1", "seed=1", "seed=01", "seed=01")]
    (job,) = plan([*given, composed(tmp_path, "seed=1", seed=1)])
    assert (job.label, job.also) == ("seed=1", ("seed=01",))


def test_equal_fingerprints_are_one_job(tmp_path: Path, study: FakeStudy) -> None:
    rates = {"1e-3": 1e-3, "2e-3": 2e-3, "0.001": 1e-3, "10e-4": 1e-3}
    jobs = plan([composed(tmp_path, f"optimizer.lr={text}", optimizer={"lr": lr}) for text, lr in rates.items()])
    assert [job.label for job in jobs] == ["optimizer.lr=1e-3", "optimizer.lr=2e-3"]
    assert [job.also for job in jobs] == [("optimizer.lr=0.001", "optimizer.lr=10e-4"), ()]
    assert sweep.merged(jobs) == [
        "One run, because the configs are the same: optimizer.lr=1e-3; optimizer.lr=0.001; optimizer.lr=10e-4"
    ]


@pytest.mark.integration
def test_a_launch_and_a_dry_run_say_which_overrides_are_one_run(
    here: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("+experiment=quickstart", "+debug=tiny", "runs_dir=runs", "tracking=none", "wait=false,true", "seed=1,2")
    assert call(*words, "dry_run=true") == (0, "")
    head, first, second, *_ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "what"
    assert "the same run as" in head
    assert first.split()[:5] == ["wait=False", "seed=1", "wait=True", "seed=1", "new"]
    assert second.split()[:5] == ["wait=False", "seed=2", "wait=True", "seed=2", "new"]
    assert call(*words) == (0, "")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "One run, because the configs are the same: wait=False seed=1; wait=True seed=1"
    assert said[2].startswith("[1/2] wait=False seed=1")


def test_one_run_is_not_asked_for_with_and_without_a_probe(tmp_path: Path, study: FakeStudy) -> None:
    off = composed(tmp_path, "probe=none")
    on = composed(tmp_path, "probe=on", probe={"norm_output_rms": {"every_steps": 5}})
    assert [job.label for job in plan([on, off])] == ["probe=on"]
    with pytest.raises(ConfigError, match=r"probe\.norm_output_rms: is off in probe=none, which is the same run"):
        plan([off, on])


def arm(runs: Path, row: str, setting: str = "", norm: str = "rmsnorm") -> Composed:
    """Return a decoder in that row, with `precision.KEY=VALUE` or nothing."""
    line, _, value = setting.partition("=")
    values = {line.removeprefix("precision."): yaml.safe_load(value)} if setting else {}
    precision = {"schedule": [{"plan": {"layers.*": row}}]} | values
    of_norm = {"kind": norm} | ({"p": 2} if norm == "mxnorm" else {})
    overrides = (f"precision={row}", *([setting] if setting else []))
    return composed(runs, *overrides, precision=precision, norm=of_norm)


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ("bf16", "precision.rounding=stochastic"),
        ("bf16", "precision.scale_rule=floor"),
        ("bf16", "precision.block_size=16"),
        ("bf16", "precision.operand_pre_round=true"),
        ("bf16", "precision.pad_blocks=true"),
        ("bf16", "precision.head=true"),
        ("bf16", "precision.skip_blocks=1"),
        ("fp8_tensor", "precision.block_size=16"),
    ],
)
def test_a_setting_that_nothing_takes_is_refused(tmp_path: Path, study: FakeStudy, row: str, setting: str) -> None:
    key, _, value = setting.partition("=")
    why = "nothing is quantised" if row == "bf16" else r"no operand of fp8_tensor \(.*\) has blocks"
    with pytest.raises(ConfigError, match=rf"^{key}: {value} is set, and {why}; write {key}="):
        plan([arm(tmp_path, row, setting)])
    (job,) = plan([arm(tmp_path, "mxfp8", setting)])
    assert job.state == "new"


@pytest.mark.parametrize("setting", ["precision.rounding=even", "precision.block_size=32", "precision.skip_blocks=0"])
def test_a_default_that_nothing_takes_is_refused(tmp_path: Path, study: FakeStudy, setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(
        ConfigError, match=rf"^{key}: {value} is set, and nothing is quantised; leave it out, or choose"
    ):
        plan([arm(tmp_path, "bf16", setting)])
    assert len(plan([arm(tmp_path, row, setting) for row in ("bf16", "mxfp8")])) == 2


def test_arms_may_share_a_setting_that_one_of_them_takes(tmp_path: Path, study: FakeStudy) -> None:
    away, floor = "precision.rounding=away", "precision.scale_rule=floor"
    assert len(plan([arm(tmp_path, row, away) for row in ("bf16", "mxfp8")])) == 2
    with pytest.raises(ConfigError, match=r"^2 of 3 jobs cannot run, [^\n]*\n  2 of 3 jobs: prec[^\n]*: away is set"):
        plan([arm(tmp_path, "bf16", away), arm(tmp_path, "fp32", away), arm(tmp_path, "mxfp8", floor)])


def test_a_setting_of_the_experiment_s_or_one_that_its_norm_takes_is_no_choice_in_vain(
    tmp_path: Path, study: FakeStudy
) -> None:
    of_experiment = dataclasses.replace(arm(tmp_path, "bf16", "precision.rounding=away"), overrides=("precision=bf16",))
    of_norm = arm(tmp_path, "bf16", "precision.block_size=16", norm="mxnorm")
    undone = dataclasses.replace(arm(tmp_path, "bf16", even := "precision.rounding=even"), undoes=frozenset({even}))
    assert len(plan([of_experiment, of_norm, undone])) == 3


def test_a_corpus_is_identified_once(tmp_path: Path, study: FakeStudy) -> None:
    other = {"kind": "pysource", "include_site_packages": True}
    plan(seeds(tmp_path, 1, 2, 3) + seeds(tmp_path, 4, 5, data=other))
    assert [data.include_site_packages for data in study.identified] == [False, True]


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_result_is_not_trained_again_whatever_its_experiment_was(
    tmp_path: Path, study: FakeStudy, state: str
) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state=state)
    (job,) = plan(seeds(tmp_path, 1, experiment="other"))
    assert (job.state, job.folder) == (state, folder.path)


@pytest.mark.parametrize("state", ["queued", "preempted", "failed", "cancelled"])
def test_an_unfinished_run_is_resumed_where_it_is(tmp_path: Path, study: FakeStudy, state: str) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state=state)
    (job,) = plan(seeds(tmp_path, 1, experiment="other"))
    assert (job.state, job.folder) == ("resume", folder.path)
    assert claim(job).path == folder.path


def test_a_resumed_run_has_today_s_options_and_says_by_what_code_it_goes_on(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="failed")
    first = folder.provenance() | {"commit": "a" * 40}
    folder.set_provenance(first)
    (job,) = plan(seeds(tmp_path, 1, experiment="other", checkpoint={"every_steps": 7}))
    assert f"goes on: was failed at step 0 (commit {'a' * 40} then, " in inline.remark(job)
    claim(job)
    config = folder.config()
    assert isinstance(config, Pretrain)
    assert (config.checkpoint.every_steps, config.experiment) == (7, "quick")
    about = folder.provenance()
    assert about.pop("resumed") == [provenance() | code_of("pretrain")]
    assert about == first
    assert differences(folder, "pretrain") == ""


def test_a_run_that_another_process_of_this_machine_holds_is_left_to_it(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="running", host=socket.gethostname())
    with folder.lock():
        for again in (seeds(tmp_path, 1), seeds(tmp_path, 1, rerun=True)):
            assert [(job.state, job.folder) for job in plan(again)] == [("running", folder.path)]


def test_a_run_whose_process_was_killed_goes_on_at_once(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="running", host=socket.gethostname(), heartbeat_s=time.time())
    assert [(job.state, job.folder) for job in plan(seeds(tmp_path, 1))] == [("resume", folder.path)]


@pytest.mark.parametrize(("age_s", "state"), [(30, "running"), (90, "resume")])
def test_another_machine_is_believed_while_its_heart_beats(
    tmp_path: Path, study: FakeStudy, age_s: float, state: str
) -> None:
    existing(plan(seeds(tmp_path, 1)), state="running", host="elsewhere", heartbeat_s=time.time() - age_s)
    assert [job.state for job in plan(seeds(tmp_path, 1))] == [state]


def test_of_two_processes_one_makes_the_folder(tmp_path: Path, study: FakeStudy) -> None:
    (job,) = plan(seeds(tmp_path, 1))
    claim(job)
    with pytest.raises(RunLocked, match="already contains a run"):
        claim(job)


def test_rerun_moves_every_earlier_run_aside_and_keeps_it(tmp_path: Path, study: FakeStudy) -> None:
    first = existing(plan(seeds(tmp_path, 1)), state="finished")
    (first.path / "mark").touch()
    for _ in range(2):
        (job,) = plan(seeds(tmp_path, 1, rerun=True))
        assert (job.state, job.replaces) == ("new", first.path)
        claim(job).update(state="finished")
    names = {path.name for path in first.path.parent.iterdir()}
    assert names == {first.path.name, f"{first.path.name}.old-1", f"{first.path.name}.old-2"}
    assert (first.path.with_name(f"{first.path.name}.old-1") / "mark").exists()
    (job,) = plan(seeds(tmp_path, 1))
    assert (job.state, job.folder) == ("finished", first.path)


def test_a_replaced_run_takes_the_number_after_all_others(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    for end in ("old-1", "old-10", "old-x"):
        folder.path.with_name(f"{folder.path.name}.{end}").mkdir()
    with set_aside(folder) as aside:
        assert aside.name == f"{folder.path.name}.old-11"


@each("leaves", ([], ["status.lock", "config.yaml", ".provenance.json.12.34"]))
def test_a_rerun_that_was_killed_before_it_had_a_folder_loses_nothing(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str], leaves: list[str]
) -> None:
    runs = tmp_path / str(len(leaves))
    folder = existing(plan(seeds(runs, 1)), state="finished", reason="the first")
    with set_aside(folder):  # and is killed here
        if leaves:
            folder.path.mkdir()
        for name in leaves:
            (folder.path / name).touch()
    assert [run.status().reason for run in folders_of([runs, runs / "quick"])] == ["the first"] * 2
    (job,) = plan(seeds(runs, 1, dry_run=True))
    assert (job.state, job.folder.name) == ("finished", f"{folder.path.name}.old-1")
    (job,) = plan(seeds(runs, 1))
    assert (job.state, job.folder, folder.status().reason) == ("finished", folder.path, "the first")
    assert "was put back; a rerun was killed after it had set it aside" in capsys.readouterr().out
    (job,) = plan(seeds(runs, 1, rerun=True))
    assert job.replaces == folder.path
    claim(job)
    assert [run.status().reason for run in folders_of([runs])] == ["the first"]  # until the new one has ended
    assert sorted(path.name for path in folder.path.parent.iterdir()) == [job.folder.name, f"{job.folder.name}.old-1"]


def test_nobody_puts_back_what_a_rerun_is_replacing(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    with set_aside(folder):
        (job,) = plan(seeds(tmp_path, 1))
        assert job.state == "running"
        assert not folder.path.exists()


def test_what_looks_like_a_run_is_not_thrown_away(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    with set_aside(folder):
        folder.path.mkdir()
        (folder.path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"has metrics\.jsonl and no status\.json; move the folder away"):
        plan(seeds(tmp_path, 1))


def test_a_rerun_has_the_memberships_of_what_it_replaces_from_the_first_moment(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    folder.join(Membership(experiment="quick", label="norm=rmsnorm", choices={"sweep": "grid"}))
    (job,) = plan(seeds(tmp_path, 1, rerun=True))
    monkeypatch.setattr(RunFolder, "join", None)
    assert [asked.sweep for asked in claim(job).memberships()] == [None, "grid"]


def test_provenance_says_how_the_run_was_asked_for(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1, 2)))
    origin = json.loads((folder.path / "provenance.json").read_text())
    assert origin["overrides"] == ["+experiment=quick", "seed=1"]
    assert origin["choices"] == {"experiment": "quick", "norm": "rmsnorm"}
    assert origin["label"] == "seed=1"
    assert shlex.split(origin["command"]) == sys.orig_argv


def test_a_skip_says_what_differs_from_now(tmp_path: Path, study: FakeStudy) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    assert differences(folder, "pretrain") == ""
    folder.set_provenance(folder.provenance() | {"torch": "2.0.0"})
    assert differences(folder, "pretrain").startswith("torch 2.0.0 then, ")
    (job,) = plan(seeds(tmp_path, 1, stale="ok"))
    assert "skipped: finished (torch 2.0.0 then, " in inline.remark(job)
