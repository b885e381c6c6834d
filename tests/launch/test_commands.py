"""+launch=status and cancel work on the folders of runs that a fake Slurm has, or has had."""

from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path

import arm_configs
import pytest
from commands import call
from fake_slurm import FakeSlurm
from fake_study import FakeStudy, composed, seeds

from mxstudy.launch import remote
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.launch.table import names_by_kind
from mxstudy.tracking import code
from mxstudy.tracking.folder import RunFolder


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


def test_what_stands_in_quotes_is_read_as_a_training_reads_it(
    tmp_path: Path, runs: dict[str, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ü b").symlink_to(tmp_path / "runs")
    quoted = f'runs_dir="{tmp_path}/ü b"'
    assert call("+launch=status", quoted, 'norm="rmsnorm"', "seed=1,2") == (0, "")
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2
    assert call("+launch=status", f"runs_dir={tmp_path}/ü b") == (0, "")  # Hydra cannot read it, and need not
    assert call("+launch=cancel", quoted, "seed=55")[1].startswith("seed: no run in")


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
    monkeypatch.setattr("mxstudy.launch.claiming.code_of", functools.cache(code.code_of.__wrapped__))
    claimed = remote.claim_all(plan(seeds(tmp_path / "runs", *range(16))))
    assert digested == [threading.main_thread().name]
    assert {one.folder.code() for one in claimed} == {code.recorded(digests())["code"]}
