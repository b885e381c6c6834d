"""Every point arrives once, even if a store, the network or the process itself fails."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
from mirrored import ARTIFACTS, losses, met_by_another, mirror, points, send, the_run, warnings
from tracked import training_row, write_rows

from benchmarks.databases import make_writable
from benchmarks.mlflow_server import Server
from mxstudy.tracking import mlflow_mirror as module
from mxstudy.tracking.folder import RunFolder, replace_file
from mxstudy.tracking.journal import Journal
from mxstudy.tracking.mlflow_mirror import Position
from mxstudy.tracking.mlflow_store import connect, create_store

pytestmark = pytest.mark.integration


def train_forever(folder: RunFolder, uri: str) -> None:
    journal, follower = Journal(folder.journal_path), mirror(uri, folder)
    follower.start()
    for step in range(10**6):
        journal.write(training_row(step))
        if step % 10 == 9:
            replace_file(folder.path / "checkpoint", f"{step + 1}")
            follower.covered(step + 1)
            time.sleep(0.02)


def test_a_store_that_is_away_is_one_warning_and_caught_up_with_later(
    tmp_path: Path, empty_store: Path, folder: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr(module, "LAST_CHANCE_S", 1.0)
    caplog.set_level(logging.WARNING)
    path = tmp_path / "away.db"
    path.mkdir()  # no database can be opened there
    uri = f"sqlite:///{path}"
    write_rows(folder, [training_row(step) for step in range(5)])
    follower = mirror(uri, folder)
    follower.start()
    follower.covered(3)
    while not warnings(caplog):
        time.sleep(0.01)
    problem = follower.finish("finished")
    assert problem is not None
    assert problem.startswith(f"{uri}: OperationalError: unable to open database file")
    assert len(warnings(caplog)) == 1
    folder.update(state="finished")
    path.rmdir()
    shutil.copy(empty_store, path)
    assert mirror(uri, folder).catch_up() is None
    assert points(uri) == losses(folder)
    assert the_run(uri).info.status == "FINISHED"


def test_a_database_that_is_read_only_at_first_is_one_line_and_gets_everything(
    uri: str,
    folder: RunFolder,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = Path(uri.removeprefix("sqlite:///"))
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.1)
    make_writable(database, False)
    write_rows(folder, [training_row(step) for step in range(5)])
    follower = mirror(uri, folder)
    follower.start()
    while not warnings(caplog):
        time.sleep(0.01)
    time.sleep(0.5)  # further attempts
    make_writable(database, True)
    assert follower.finish("finished") is None
    assert points(uri) == losses(folder)
    (line,) = warnings(caplog)
    assert line.endswith(f"{uri}: OperationalError: attempt to write a readonly database")
    assert "Traceback" not in capfd.readouterr().err


def unreliable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every second call with metrics raise after it was obeyed, like one that takes too long.

    Return the sizes of all calls.
    """
    from mlflow import MlflowClient

    obeyed, sizes = MlflowClient.log_batch, []

    def log_batch(self: Any, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        obeyed(self, run_id, metrics, params)
        if metrics:
            sizes.append(len(metrics))
            if len(sizes) % 2:
                raise TimeoutError("no answer")

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    return sizes


@pytest.mark.slow
def test_calls_that_seem_to_fail_are_repeated_as_long_as_others_succeed(
    uri: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "METRICS_PER_CALL", 20)
    monkeypatch.setattr(module, "LAST_CHANCE_S", 1.0)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.2)
    sizes, began_s = unreliable(monkeypatch), time.monotonic()
    spike = {"spike": {"loss": 9.0, "mean": 4.0, "std": 0.1}}
    write_rows(folder, [row for step in range(30) for row in (training_row(step), {"step": step} | spike)])
    send(uri, folder)
    assert time.monotonic() - began_s > 1.5
    assert sizes == [20] * 20 + [10] * 2  # seven points per step; a call is repeated, and no other is
    assert points(uri) == losses(folder)
    assert points(uri, "train/spikes") == [(step, step + 1.0) for step in range(30)]


def test_a_run_that_is_deleted_while_it_is_sent_is_sent_anew(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(step) for step in range(3)])
    follower = mirror(uri, folder)
    follower.start()
    follower.covered(3)
    while (follower.position or Position("", "")).next_step < 3:
        time.sleep(0.01)
    connect(uri).delete_run(follower.position.run_id)
    write_rows(folder, [training_row(step) for step in range(3, 6)])
    follower.covered(6)
    assert follower.finish("finished") is None
    assert points(uri) == losses(folder)


def test_nothing_is_asked_of_a_store_that_has_everything(
    uri: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(folder, [training_row(0)])
    send(uri, folder)
    folder.update(state="finished")
    monkeypatch.setattr(module, "connect", lambda uri: pytest.fail("asked"))
    assert mirror(uri, folder).catch_up() is None


def test_two_processes_that_catch_up_at_once_leave_one_run(
    uri: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(folder, [training_row(step) for step in range(3)])
    folder.update(state="finished")
    monkeypatch.setattr(module, "find_run", met_by_another(module.find_run))
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda follower: follower.catch_up(), [mirror(uri, folder) for _ in range(2)])] == [None] * 2
    assert points(uri) == losses(folder)


def test_a_run_that_its_own_process_still_sends_is_left_to_it(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(0)])
    folder.update(state="finished")
    with folder.lock():
        assert "is writing to it" in (mirror(uri, folder).catch_up(wait_s=0.2) or "")
        assert connect(uri).search_runs(["1"]) == []
        send(uri, folder)
    assert mirror(uri, folder).catch_up() is None
    assert points(uri) == losses(folder)


def test_a_run_whose_folder_cannot_be_locked_is_left_with_a_line(uri: str, folder: RunFolder) -> None:
    folder.update(state="finished")
    (folder.path / "run.lock").unlink(missing_ok=True)
    (folder.path / "run.lock").mkdir()
    assert "run.lock" in (mirror(uri, folder).catch_up() or "")


@pytest.mark.slow
def test_a_process_that_is_killed_and_resumed_leaves_every_step_once(uri: str, folder: RunFolder) -> None:
    process = forked.context().Process(target=train_forever, args=(folder, uri))
    process.start()
    deadline_s = time.time() + 60
    while (mirror(uri, folder).position or Position("", "")).next_step < 100 and time.time() < deadline_s:
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    checkpoint = int((folder.path / "checkpoint").read_text())
    assert 100 <= mirror(uri, folder).position.next_step <= checkpoint
    rest = [training_row(step, loss=1.0) for step in range(checkpoint, checkpoint + 20)]
    write_rows(folder, rest, resumed_from=checkpoint)
    send(uri, folder)
    assert points(uri) == losses(folder)
    assert [step for step, _ in points(uri)] == list(range(checkpoint + 20))


@pytest.mark.slow
def test_a_server_that_is_killed_and_restarted_gets_every_point_once(
    server: Server, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server.start()
    assert create_store(server.uri) is None
    follower = mirror(server.uri, folder)
    follower.start()
    for start in range(0, 400, 10):
        rows = [training_row(step, loss=math.nan if step == 333 else None) for step in range(start, start + 10)]
        write_rows(folder, rows)
        follower.covered(start + 10)
        time.sleep(0.05)
        if start == 100:
            server.kill()
        if start == 250:
            assert len(warnings(caplog)) == 1
            server.start()
    assert follower.finish("finished") is None
    journal = [(step, loss) for step, loss in losses(folder) if step != 333]
    arrived = points(server.uri)
    assert [step for step, _ in arrived] == list(range(400))
    assert [(step, loss) for step, loss in arrived if step != 333] == journal
    assert the_run(server.uri).info.status == "FINISHED"
    assert [file.path for file in connect(server.uri).list_artifacts(follower.position.run_id)] == ARTIFACTS
