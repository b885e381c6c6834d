"""A run's folder has an atomic status, one writer, and a heartbeat that says nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from each import each
from tracked import FINGERPRINT, make_folder

from mxstudy.config import read_run
from mxstudy.reader import ConfigError, plain
from mxstudy.tracking import folder as module
from mxstudy.tracking.folder import RunFolder, RunLocked, Status
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.locks import try_lock

HOLDS_THE_LOCK = """
import sys, time
from pathlib import Path
from mxstudy.tracking.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    time.sleep(60)
"""
COUNTS_STEPS = """
import sys
from pathlib import Path
from mxstudy.tracking.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
for step in range(1, 201):
    folder.update(step=step)
"""


@contextmanager
def process(script: str, folder: RunFolder):
    started = subprocess.Popen([sys.executable, "-c", script, str(folder.path)], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def test_a_new_run_is_queued_and_its_config_comes_back(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, label="norm=mxnorm_p2")
    assert folder.path == tmp_path / "quick" / FINGERPRINT[:12]
    assert (folder.status().state, folder.status().step) == ("queued", 0)
    assert folder.status().fingerprint == FINGERPRINT
    assert folder.config() == read_run(yaml.safe_load(folder.config_path.read_text()))
    assert folder.config().optimizer.max_grad_norm == float("inf")
    assert list(yaml.safe_load(folder.config_path.read_text())) == list(plain(folder.config()))
    assert folder.provenance()["label"] == "norm=mxnorm_p2"


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    make_folder(tmp_path).update(state="running")
    with pytest.raises(ConfigError, match="already contains a run"):
        make_folder(tmp_path)
    assert find_runs(tmp_path)[0].status().state == "running"


def test_an_update_changes_what_it_names(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.update(state="running", step=3, steps=10)
    folder.update(state="diverged", reason="loss: nan")
    status = folder.status()
    assert (status.state, status.step, status.steps, status.reason) == ("diverged", 3, 10, "loss: nan")


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"state": "done"}, "state: 'done' is not a choice"), ({"step": "3"}, "step: '3' is not an integer")],
)
def test_an_update_that_makes_no_sense_is_refused_and_changes_nothing(
    tmp_path: Path, changes: dict, error: str
) -> None:
    folder = make_folder(tmp_path)
    before = folder.status()
    with pytest.raises(ConfigError, match=error):
        folder.update(**changes)
    assert folder.status() == before


@pytest.mark.parametrize("content", ["", '{"state": "run', "[]", '{"state": "finished"}'])
def test_a_damaged_status_is_a_clear_error(tmp_path: Path, content: str) -> None:
    folder = make_folder(tmp_path)
    folder.status_path.write_text(content)
    with pytest.raises(ConfigError, match=r"status\.json: cannot be read .*; move the folder away"):
        folder.status()


def test_a_folder_without_a_status_is_no_run_s(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=rf"^{folder}: is no run's folder; it has no status\.json$"):
            RunFolder(folder).status()


def test_a_damaged_config_is_a_clear_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.config_path.write_text(folder.config_path.read_text().replace("hidden_size", "hiden_size"))
    with pytest.raises(ConfigError, match=r"config\.yaml: model\.hiden_size: no such key; did you mean 'hidden_size'"):
        folder.config()


@each(
    ("state", "heartbeat_s", "stale"),
    [("running", 1000.0, False), ("running", 939.0, True), ("running", None, True), ("finished", 0.0, False)],
)
def test_a_run_without_a_heartbeat_for_a_minute_is_stale(state, heartbeat_s: float | None, stale: bool) -> None:
    status = Status(fingerprint=FINGERPRINT, started_s=900.0, state=state, heartbeat_s=heartbeat_s)
    assert status.is_stale(now_s=1000.0) is stale


def test_a_second_writer_is_told_who_the_first_is_until_that_is_killed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with process(HOLDS_THE_LOCK, folder) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunLocked, match=rf"process {holder.pid} on {os.uname().nodename}"), folder.lock():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with folder.lock(), pytest.raises(RunLocked, match=rf"process {os.getpid()} on"), RunFolder(folder.path).lock():
            pass
    with folder.lock():
        assert folder.status().state == "queued"


def test_a_look_at_the_lock_costs_nobody_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes the lock in the middle of a look waits until the look is over."""
    folder, has_looked, may_end = make_folder(tmp_path), threading.Event(), threading.Event()

    def slow(file: int) -> bool:
        free = try_lock(file)
        if threading.current_thread() is looker:
            has_looked.set()
            may_end.wait(30)
        return free

    monkeypatch.setattr(module, "try_lock", slow)
    looker = threading.Thread(target=folder.is_locked)
    looker.start()
    assert has_looked.wait(30)
    threading.Timer(0.1, may_end.set).start()
    with folder.lock():
        assert folder.is_locked()
    looker.join()
    assert not folder.is_locked()


def test_the_heart_says_whose_it_is_and_beats(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with folder.heartbeat(every_s=0.01):
        first = folder.status()
        deadline_s = time.time() + 10
        while folder.status().heartbeat_s == first.heartbeat_s and time.time() < deadline_s:
            time.sleep(0.01)
        assert folder.status().heartbeat_s > first.heartbeat_s
    assert (first.pid, first.host) == (os.getpid(), os.uname().nodename)
    last = folder.status()
    time.sleep(0.05)
    assert folder.status() == last


@pytest.mark.integration
def test_a_heartbeat_never_undoes_an_update(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with folder.heartbeat(every_s=0.0005):
        for step in range(300):
            state = ("running", "preempted", "diverged")[step % 3]
            folder.update(state=state, step=step)
            assert (folder.status().state, folder.status().step) == (state, step)


@pytest.mark.integration
def test_updates_of_two_processes_do_not_lose_each_other(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with process(COUNTS_STEPS, folder) as counter:
        reasons = 0
        while counter.poll() is None or reasons < 200:
            reasons += 1
            folder.update(reason=str(reasons))
        assert counter.returncode == 0
    assert (folder.status().step, folder.status().reason) == (200, str(reasons))
