"""Jobs that run one after another print, keep and exit as they should."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_study import FakeStudy, existing, seeds

from mxstudy.launch import inline, parents, worker
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.tracking.folder import RunFolder, RunLocked
from mxstudy.train.signals import Leave


def status(runs: Path, seed: int):
    (job,) = plan(seeds(runs, seed))
    return RunFolder(job.folder).status()


def fail(folder: RunFolder) -> str:
    raise RuntimeError("out of luck")


def preempt(folder: RunFolder) -> str:
    folder.update(state="preempted", reason="SIGTERM", step=3)
    return "preempted"


def press_ctrl_c(folder: RunFolder) -> str:
    raise KeyboardInterrupt


def get_sigusr2(folder: RunFolder) -> str:
    os.kill(os.getpid(), signal.SIGUSR2)
    return "finished"


def close_terminal(folder: RunFolder) -> str:
    os.kill(os.getpid(), signal.SIGHUP)
    return "finished"


@pytest.fixture
def not_nohup() -> Iterator[None]:
    """Let a terminal that closes stop this process, even if the tests were begun with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_jobs_run_in_order_with_a_line_each(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = plan(seeds(tmp_path, 1, 2))
    assert inline.run_jobs(jobs) == 0
    assert study.ran == ["seed=1", "seed=2"]
    assert capsys.readouterr().out.splitlines() == [
        f"[1/2] seed=1  {jobs[0].folder}",
        f"[2/2] seed=2  {jobs[1].folder}",
    ]
    assert study.summarized == [("bf16 rmsnorm seed=1", "finished"), ("bf16 rmsnorm seed=2", "finished")]


def test_what_is_there_is_skipped_and_summed_up_with_the_rest(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    inline.run_jobs(plan(seeds(tmp_path, 1)))
    assert study.summarized == []
    capsys.readouterr()
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2, baseline={"norm": "rmsnorm"}))) == 0
    assert study.ran == ["norm=rmsnorm seed=1", "seed=2"]
    assert capsys.readouterr().out.splitlines()[0].endswith("  skipped: finished")
    assert study.summarized == [("bf16 rmsnorm seed=1", "finished"), ("bf16 rmsnorm seed=2", "finished")]
    assert study.baseline == {"norm": "rmsnorm"}


def test_a_divergence_is_a_result(tmp_path: Path, study: FakeStudy) -> None:
    study.outcomes["seed=1"] = lambda folder: "diverged"
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2))) == 0
    assert study.summarized == [("bf16 rmsnorm seed=1", "diverged"), ("bf16 rmsnorm seed=2", "finished")]


def test_a_failure_is_kept_and_the_others_go_on(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    study.outcomes["seed=1"] = fail
    jobs = plan(seeds(tmp_path, 1, 2))
    assert inline.run_jobs(jobs) == 1
    assert study.ran == ["seed=1", "seed=2"]
    assert study.summarized == [("bf16 rmsnorm seed=2", "finished")]
    after = status(tmp_path, 1)
    assert (after.state, after.reason) == ("failed", "RuntimeError: out of luck")
    assert 'raise RuntimeError("out of luck")' in (jobs[0].folder / "error.log").read_text()
    said = capsys.readouterr().out
    assert f"failed: RuntimeError: out of luck  ({jobs[0].folder / 'error.log'})" in said
    assert said.endswith(f"1 of 2 jobs are not done:\n  failed: seed=1  {jobs[0].folder}\n")


def test_what_another_process_runs_is_left_alone_and_not_done(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = plan(seeds(tmp_path, 1, 2, 3))
    theirs = claim(jobs[0])
    theirs.update(state="running", host=socket.gethostname())

    def taken_meanwhile(folder: RunFolder) -> str:
        raise RunLocked("process 7 writes this run")

    study.outcomes["seed=2"] = taken_meanwhile
    with theirs.lock():
        assert inline.run_jobs(jobs) == 1
    assert study.ran == ["seed=2", "seed=3"]
    assert theirs.status().state == "running"
    said = capsys.readouterr().out
    assert f"[1/3] seed=1  {theirs.path}  left alone: another process runs it" in said
    assert "left alone: process 7 writes this run" in said
    assert "2 of 3 jobs are not done:" in said
    assert not (jobs[1].folder / "error.log").exists()


def test_what_another_process_ends_while_the_others_run_is_done(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = plan(seeds(tmp_path, 1, 2))
    theirs = claim(jobs[0])
    theirs.update(state="running", host=socket.gethostname())

    def while_they_finish(folder: RunFolder) -> str:
        theirs.update(state="finished")
        return "finished"

    study.outcomes["seed=2"] = while_they_finish
    with theirs.lock():
        assert inline.run_jobs(jobs) == 0
    assert study.ran == ["seed=2"]
    assert "are not done" not in capsys.readouterr().out


@pytest.mark.parametrize("answer", [{"rerun": True}, {"stale": "rerun"}])
def test_what_another_process_ended_meanwhile_is_trained_again_if_that_was_asked_for(
    tmp_path: Path, study: FakeStudy, answer: dict[str, Any]
) -> None:
    theirs = existing(plan(seeds(tmp_path, 1)), state="running", host=socket.gethostname())
    with theirs.lock():
        (job,) = plan(seeds(tmp_path, 1, probe={"norm_output_rms": {"every_steps": 5}}, **answer))
    assert job.state == "running"
    theirs.update(state="finished")
    assert inline.run_jobs([job]) == 0
    assert len(study.ran) == 1
    assert len(list(theirs.path.parent.glob("*.old-1"))) == 1


@pytest.mark.parametrize("damage", ["torn", "unsuitable", "full disk"])
def test_a_run_that_is_damaged_meanwhile_does_not_stop_the_others(
    tmp_path: Path,
    study: FakeStudy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    jobs = plan(seeds(tmp_path, 1, 2, 3, probe={"norm_output_rms": {"every_steps": 5}}))
    if damage == "full disk":
        folder, why = jobs[1].folder, "No space left on device"
        join = inline.join
        monkeypatch.setattr(inline, "join", lambda job: full() if job.folder == folder else join(job))
    else:
        theirs = existing(plan(seeds(tmp_path, 2)), state="finished")
        folder, why = theirs.path, f"probe.norm_output_rms: was off in {theirs.path}"
        if damage == "torn":
            theirs.status_path.write_text("{")
            why = f"{theirs.status_path}: cannot be read"
    assert inline.run_jobs(jobs) == 1
    assert study.ran == ["seed=1", "seed=3"]
    assert study.summarized == [("bf16 rmsnorm seed=1", "finished"), ("bf16 rmsnorm seed=3", "finished")]
    said = capsys.readouterr().out
    assert why in said
    assert said.endswith(f"1 of 3 jobs are not done:\n  failed: seed=2  {folder}\n")


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "memberships.json")


def test_a_run_whose_output_nobody_reads_any_more_says_so_in_its_folder(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state once stayed `running`, and later it was "killed without a message"."""

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    job = claim(plan(seeds(tmp_path, 1))[0])
    monkeypatch.setattr("builtins.print", gone)
    with pytest.raises(BrokenPipeError):
        worker.attempt(job, gone)
    assert (job.status().state, job.status().reason) == ("failed", "BrokenPipeError: [Errno 32] Broken pipe")


def test_what_another_process_finished_meanwhile_is_skipped(tmp_path: Path, study: FakeStudy) -> None:
    jobs = plan(seeds(tmp_path, 1, 2))
    claim(jobs[1]).update(state="finished")
    assert inline.run_jobs(jobs) == 0
    assert study.ran == ["seed=1"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("outcome", "reason", "code"),
    [
        (preempt, "SIGTERM", 143),
        (press_ctrl_c, "SIGINT", 130),
        (get_sigusr2, "SIGUSR2", 140),
        (close_terminal, "SIGHUP", 129),
    ],
)
def test_a_signal_ends_the_sequence_and_the_same_command_goes_on(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str], not_nohup, outcome, reason: str, code: int
) -> None:
    study.outcomes["seed=1"] = outcome
    jobs = plan(seeds(tmp_path, 1, 2))
    assert inline.run_jobs(jobs) == code
    after = status(tmp_path, 1)
    assert (after.state, after.reason) == ("preempted", reason)
    assert not jobs[1].folder.exists()
    assert study.summarized == []
    assert f"stopped by {reason} in job 1 of 2" in capsys.readouterr().out
    study.outcomes.clear()
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2))) == 0
    assert f"goes on: was preempted at step {after.step} of 10" in capsys.readouterr().out


def signalled_too_late(folder: RunFolder) -> str:
    with Leave():
        os.kill(os.getpid(), signal.SIGTERM)
    return "finished"


def test_a_signal_that_comes_too_late_for_its_job_ends_the_sequence_too(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    study.outcomes = dict.fromkeys(("seed=1", "seed=2"), signalled_too_late)
    jobs = plan(seeds(tmp_path, 1, 2))
    assert inline.run_jobs(jobs) == 143
    assert study.ran == ["seed=1"]
    assert study.summarized == []
    assert status(tmp_path, 1).reason is None
    said = capsys.readouterr().out
    assert f"stopped by SIGTERM in job 1 of 2; the same command continues after {jobs[0].folder}" in said
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2))) == 0  # nothing is left that it could stop
    assert study.ran == ["seed=1", "seed=2"]


def test_handlers_are_put_back(tmp_path: Path, study: FakeStudy) -> None:
    before = [signal.getsignal(s) for s in worker.stopping()]
    study.outcomes["norm=rmsnorm seed=1"] = fail
    inline.run_jobs(plan(seeds(tmp_path, 1)))
    assert [signal.getsignal(s) for s in worker.stopping()] == before


@pytest.mark.integration
def test_each_tracking_database_is_made_once_and_may_be_away(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def unreachable(uri: str) -> str:
        asked.append(uri)
        return f"{uri} does not answer"

    monkeypatch.setattr(parents, "create_store", unreachable)
    assert inline.run_jobs(plan(seeds(tmp_path, 1, 2, tracking={"uri": "http://localhost:1"}))) == 0
    assert asked == ["http://localhost:1"]
    assert "tracking: http://localhost:1 does not answer; the runs continue" in capsys.readouterr().out
    assert study.ran == ["seed=1", "seed=2"]
