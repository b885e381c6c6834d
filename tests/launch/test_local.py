"""Runs that a queue on this machine starts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import OWN_TEXT, SMALL, call, corpus, run_here
from each import each
from fake_study import FakeStudy, seeds

from mxstudy.config import Local
from mxstudy.launch import local, worker
from mxstudy.launch.claiming import claim
from mxstudy.launch.freeze import PACKAGE, code_version, environment_of, freeze_code
from mxstudy.launch.plan import plan
from mxstudy.launch.queues import QUEUE_LIST, Queues, local_jobs
from mxstudy.launch.run_state import observe
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal

LOCALLY = ("hydra/launcher=local", "hydra.launcher.cpus_per_task=1")


def wait_until(is_so: Callable[[], bool], timeout_s: float = 90.0) -> None:
    for _ in range(int(timeout_s / 0.05)):
        if is_so():
            return
        time.sleep(0.05)
    raise TimeoutError


def losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in read_journal(folder.journal_path) if "loss" in row]


def queued(tmp_path: Path, study: FakeStudy, command: str, number: int = 1) -> tuple[Path, list[RunFolder]]:
    """Return the plan of a queue with jobs that run this command."""
    launch = tmp_path / "launch"
    launch.mkdir()
    folders = [claim(job) for job in plan(seeds(tmp_path / "runs", *range(number)))]
    names = [f"launch/{n}" for n in range(number)]
    for name, folder in zip(names, folders, strict=True):
        Ticket(settings=Local(), job_id=name, launch=str(launch), log="LOG", submitted_s=0.0).write(folder)
    paths = {name: str(folder.path) for name, folder in zip(names, folders, strict=True)}
    logs = {name: str(tmp_path / "log") for name in names}
    setup = [f"exec {command}"]
    planned = local.QueuePlan(paths, logs, gpus=0, parallel=1, tasks=1, threads=None, setup=setup)
    (launch / "jobs.json").write_text(json.dumps(vars(planned)))
    return launch, folders


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {}
    for there in (0, 1, 8):
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: there)
        shares[there] = local.share(Local())
    assert shares == {0: (0, 1), 1: (1, 1), 8: (1, 8)}
    assert local.share(Local(gpus_per_node=4)) == (4, 2)
    assert local.share(Local(gpus_per_node=0, array_parallelism=3)) == (0, 3)
    with pytest.raises(ConfigError, match=r"gpus_per_node: 9 GPUs per job, but this machine has 8; lower it"):
        local.share(Local(gpus_per_node=9))
    with pytest.raises(ConfigError, match=r"array_parallelism: 3 jobs of 4 GPUs, but this machine has 8; lower it"):
        local.share(Local(gpus_per_node=4, array_parallelism=3))
    assert local.share(Local(jobs_per_gpu=3)) == (1, 24)
    assert local.share(Local(jobs_per_gpu=3, array_parallelism=5)) == (1, 5)
    with pytest.raises(
        ConfigError, match=r"9 jobs of 1 GPUs, but this machine has 8; lower it, or raise jobs_per_gpu=1"
    ):
        local.share(Local(array_parallelism=9))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"jobs_per_gpu: this machine has no GPU to share; leave it out"):
        local.share(Local(jobs_per_gpu=3))


@pytest.mark.integration
@each(
    ("visible", "parallel", "used"),
    [(None, 2, ["0", "0"]), (None, 3, ["0", "1", "0"]), ("4,6", 3, ["4", "6", "4"])],
)
def test_jobs_share_a_gpu(
    tmp_path: Path,
    study: FakeStudy,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    parallel: int,
    used: list[str],
) -> None:
    """The queue's first jobs share it at once: each waits until all of these are there."""
    monkeypatch.setattr(local, "POLL_S", 0.01)
    (tmp_path := tmp_path / f"{parallel}-{visible}").mkdir()
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    note = f"echo $CUDA_VISIBLE_DEVICES >> {tmp_path}/began"
    wait = f"until [ $(wc -l < {tmp_path}/began) -ge {parallel} ]; do sleep 0.01; done"
    launch, _ = queued(tmp_path, study, f"bash -c '{note}; {wait}'", parallel)
    planned = json.loads((launch / "jobs.json").read_text())
    (launch / "jobs.json").write_text(json.dumps(planned | {"gpus": 1, "parallel": parallel, "sharing": 2}))
    local.run_queue(launch)
    assert sorted((tmp_path / "began").read_text().split()) == sorted(used)


def test_processes_of_a_job_know_each_other(tmp_path: Path) -> None:
    """Two processes, on GPUs 4 and 6, have torchrun's variables and ran the setup lines before."""
    setup = [
        "export FROM_SETUP=yes",
        f"{sys.executable} - <<'END'",
        "import os; print(dict(os.environ))",
        "END",
        "exit",
    ]
    log = tmp_path / "log"
    one = local.QueuePlan({"j": "F"}, {"j": str(log)}, gpus=2, parallel=1, tasks=2, threads=3, setup=setup)
    for process in local.start(one, "j", ["4", "6"]):
        assert process.wait(30) == 0
    first, second = sorted((eval(line) for line in log.read_text().splitlines()), key=lambda of: of["RANK"])
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    for rank, of in enumerate((first, second)):
        assert (of["RANK"], of["LOCAL_RANK"], of["WORLD_SIZE"], of["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "2",
            "2",
        )
        assert (of["MASTER_ADDR"], of["CUDA_VISIBLE_DEVICES"]) == ("127.0.0.1", "4,6")
        assert (of["OMP_NUM_THREADS"], of["FROM_SETUP"]) == ("3", "yes")


def test_a_job_that_cannot_start_all_its_processes_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, real = list[subprocess.Popen[bytes]](), subprocess.Popen

    def start(*about: Any, **more: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        started.append(real(*about, **more))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    setup = ["exec sleep 60"]
    one = local.QueuePlan({"j": "F"}, {"j": str(tmp_path / "log")}, gpus=0, parallel=1, tasks=2, threads=1, setup=setup)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        local.start(one, "j", [])
    assert started[0].wait(30) == -signal.SIGKILL


@pytest.mark.integration
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("bash -c 'kill -9 $$'", "died without a message: SIGKILL"),
        ("bash -c 'kill -40 $$'", "died without a message: signal 40"),
        ("bash -c 'exit 3'", "died without a message: exit code 3"),
    ],
)
def test_a_process_that_dies_without_a_word_has_failed(
    tmp_path: Path, study: FakeStudy, command: str, reason: str
) -> None:
    launch, folders = queued(tmp_path, study, command, 2)
    local.run_queue(launch)
    for folder in folders:
        status = folder.status()
        assert (status.state, status.reason) == ("failed", f"{reason} ({tmp_path / 'log'})")


@pytest.mark.integration
def test_a_job_whose_files_are_gone_or_torn_disturbs_no_other(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first has no folder, the second a torn ticket, the third no room for its log; the list cannot be written."""
    launch, folders = queued(tmp_path, study, f"bash -c 'touch {tmp_path}/begun-$RANDOM; exit 3'", 4)
    shutil.rmtree(folders[0].path)
    (folders[1].path / "job.json").write_text("{")
    planned = json.loads((launch / "jobs.json").read_text())
    planned["logs"]["launch/2"] = str(tmp_path / "missing" / "log")
    (launch / "jobs.json").write_text(json.dumps(planned))
    (launch / QUEUE_LIST).mkdir()
    monkeypatch.setattr(local, "POLL_S", 0.01)
    local.run_queue(launch)
    said = sorted(capsys.readouterr().out.splitlines())  # the first job ends before or after the list is written
    assert [line.partition(":")[0] for line in said] == ["launch/0", "launch/1", "launch/2", QUEUE_LIST]
    assert said[0].endswith(f"{folders[0].path}: is no run's folder; it has no status.json")
    assert [folder.status().state for folder in folders[1:]] == ["queued", "queued", "failed"]
    assert len(list(tmp_path.glob("begun-*"))) == 2


@pytest.mark.integration
def test_what_a_running_job_s_files_lack_neither_stops_nor_orphans_it(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "POLL_S", 0.01)
    ticket = claim(plan(seeds(tmp_path / "runs", 0))[0]).path / "job.json"
    launch, _ = queued(tmp_path, study, f"bash -c 'echo {{ > {ticket}; sleep 0.3; touch {tmp_path}/ended'")
    local.run_queue(launch)
    assert (tmp_path / "ended").exists()
    assert len(capsys.readouterr().out.splitlines()) == 1  # however often it looked


@pytest.mark.integration
def test_one_process_of_several_that_dies_takes_the_others_with_it(tmp_path: Path, study: FakeStudy) -> None:
    launch, (folder,) = queued(tmp_path, study, "bash -c 'if [ $RANK = 1 ]; then exit 4; fi; sleep 60'")
    planned = json.loads((launch / "jobs.json").read_text())
    (launch / "jobs.json").write_text(json.dumps(planned | {"tasks": 2}))
    began_s = time.monotonic()
    local.run_queue(launch)
    assert time.monotonic() - began_s < 30
    assert folder.status().state == "failed"


def test_a_signal_that_comes_before_training_is_a_preemption(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a handler of the worker's own, submitit's would end a short job for good."""
    folder = claim(plan(seeds(tmp_path / "runs", 0))[0])
    monkeypatch.setattr(worker, "note_the_machine", lambda _: os.kill(os.getpid(), signal.SIGUSR2))
    assert worker.work(folder) == "preempted"
    assert folder.status().reason == "SIGUSR2"
    assert study.ran == []


@pytest.mark.integration
def test_what_is_cancelled_is_not_begun(tmp_path: Path, study: FakeStudy) -> None:
    launch, folders = queued(tmp_path, study, f"touch {tmp_path}/begun-$RANDOM", 2)
    ticket = ticket_of(folders[0])
    assert ticket is not None
    replace(ticket, cancelled=True).write(folders[0])
    local.run_queue(launch)
    assert folders[0].status().state == "cancelled"
    assert len(list(tmp_path.glob("begun-*"))) == 1


@pytest.mark.integration
def test_code_is_copied_once_and_found_before_all_other(tmp_path: Path) -> None:
    """The copy is whole, although it has no conf/, because the processes of jobs import nothing that reads conf/."""
    code = freeze_code(tmp_path)
    assert code == tmp_path / ".launch" / f"code-{code_version()}" == freeze_code(tmp_path)
    assert (code / "mxstudy/reader.py").read_bytes() == (PACKAGE / "reader.py").read_bytes()
    (tmp_path / "mxstudy.py").write_text("raise RuntimeError('not this one')")
    where = "import mxstudy.launch.__main__ as started; print(started.__file__)"
    environment = os.environ | environment_of(code)
    said = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (said.stdout.strip(), said.stderr) == (str(code / "mxstudy/launch/__main__.py"), "")


@each("altered", ["mxstudy/reader.py", "mxstudy/reader/__init__.py", "mxstudy/new.so", "torch.py"])
def test_a_copy_of_the_code_that_was_altered_is_refused(tmp_path: Path, altered: str) -> None:
    """Somebody else's runs/ may have been copied here, and its code would run unasked."""
    code = freeze_code(tmp_path)
    (code / altered).parent.mkdir(exist_ok=True)
    (code / altered).write_text("print('not mine')")
    with pytest.raises(ConfigError, match=rf"{code.name}: its content is not the code in its name; delete it"):
        freeze_code(tmp_path)
    shutil.rmtree(code)
    assert freeze_code(tmp_path) == code


def test_a_folder_behind_a_link_is_not_of_the_code(tmp_path: Path) -> None:
    code = freeze_code(tmp_path)
    (code / "mxstudy/reader").symlink_to(tmp_path)  # Python would import it in place of reader.py
    with pytest.raises(ConfigError, match="its content is not the code in its name"):
        freeze_code(tmp_path)


def test_what_python_compiled_in_the_code_is_not_trusted(tmp_path: Path) -> None:
    code = freeze_code(tmp_path)
    for folder in ("mxstudy", "mxstudy/launch"):
        (code / folder / "__pycache__").mkdir()
        (code / folder / "__pycache__" / "reader.cpython-311.pyc").write_bytes(b"other code")
    (code / "mxstudy/data/__pycache__").symlink_to(mine := tmp_path / "mine")
    mine.mkdir()
    (mine / "kept.pyc").touch()
    assert freeze_code(tmp_path) == code
    assert [*code.rglob("__pycache__")] == []
    assert (mine / "kept.pyc").exists()


@pytest.mark.slow
def test_a_job_knows_no_hydra() -> None:
    code = "import sys, mxstudy.launch.__main__; sys.exit(bool({'hydra', 'omegaconf'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)


@pytest.mark.slow
def test_a_sweep_runs_as_it_was_submitted_and_is_resumed_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the submission its experiment is edited, a file that shadows the code appears, and a job is killed."""
    (tmp_path / "conf/experiment").mkdir(parents=True)
    mine = tmp_path / "conf/experiment/mine.yaml"
    mine.write_text("# @package _global_\ndefaults: [quickstart, _self_]\noptimizer: {lr: 1e-3}\n")
    words = [
        *(f"--config-dir={tmp_path}/conf", "+experiment=mine", *SMALL[1:], *OWN_TEXT, corpus(tmp_path)),
        *("train.steps=40", "seed=0,1"),
    ]
    run_here(tmp_path, *words, *LOCALLY)
    said = capsys.readouterr().out
    mine.write_text("# @package _global_\ndefaults: [quickstart, _self_]\noptimizer: {lr: 77}\n")
    (tmp_path / "mxstudy.py").write_text("raise RuntimeError('not this one')")
    folders = {folder.config().seed: folder for folder in find_runs(tmp_path / "runs")}
    for folder in folders.values():
        ticket = ticket_of(folder)
        assert ticket is not None
        assert f"{ticket.job_id}  bf16 rmsnorm seed={folder.config().seed}" in said
        assert f"{folder.path.name}  {folder.path.relative_to(tmp_path)}" in said

    wait_until(lambda: folders[0].status().step >= 6)
    os.kill(folders[0].status().pid or 0, signal.SIGKILL)
    wait_until(lambda: not any(observe(folder, Queues()).in_flight for folder in folders.values()))
    assert folders[0].status().state == "failed"
    assert folders[1].status().state == "finished"
    wait_until(lambda: local_jobs(Path(ticket.launch)) == {})

    mine.write_text("# @package _global_\ndefaults: [quickstart, _self_]\noptimizer: {lr: 1e-3}\n")
    (tmp_path / "mxstudy.py").unlink()
    run_here(tmp_path, *words, *LOCALLY, "wait=true")
    assert {folder.status().state for folder in folders.values()} == {"finished"}
    assert folders[0].config().optimizer.lr == 1e-3
    undisturbed = tmp_path / "undisturbed"
    run_here(tmp_path, *words, f"runs_dir={undisturbed}")
    for folder in find_runs(undisturbed):
        assert losses(folder) == losses(folders[folder.config().seed])
        assert len(losses(folder)) == 40


@pytest.mark.integration
def test_an_invalid_job_refuses_the_sweep_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = call("+experiment=quickstart", "optimizer.lr=1e-3,-1", *LOCALLY)
    assert code == 1
    assert "1 of 2 jobs cannot run" in said or "optimizer.lr" in said
    assert list(tmp_path.iterdir()) == []
