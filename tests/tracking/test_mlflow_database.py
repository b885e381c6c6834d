"""MLflow's SQLite file exists whole or not at all, whoever is killed and however many begin at once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from mxstudy.tracking import mlflow_database
from mxstudy.tracking.locks import waiting_lock
from mxstudy.tracking.mlflow_database import is_made, make_database
from mxstudy.tracking.mlflow_store import connect

MAKES = (
    "import sys, pathlib; from mxstudy.tracking.mlflow_database import make_database as m; m(pathlib.Path(sys.argv[1]))"
)


def maker(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", MAKES, str(path)], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    make_database(path)
    return path


@pytest.mark.integration
def test_it_is_made_once_and_leaves_nothing_else(made: Path) -> None:
    before = made.stat().st_mtime_ns
    make_database(made)
    assert made.stat().st_mtime_ns == before
    assert {path.name for path in made.parent.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}


def half_made(path: Path) -> None:
    """Leave what MLflow leaves when it is killed in a migration: tables, one of them temporary, and no experiment."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER)")
        connection.execute("CREATE TABLE _alembic_tmp_experiments (experiment_id INTEGER)")
        connection.commit()


@pytest.mark.integration
def test_a_half_made_one_is_moved_aside_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mlflow.db"
    half_made(path)
    old = path.read_bytes()
    assert connect(f"sqlite:///{path}").search_experiments(max_results=1)[0].name == "Default"
    assert (tmp_path / "mlflow.db.half-made-1").read_bytes() == old
    assert "mlflow.db was left half-made by a command that was stopped" in caplog.text


@pytest.mark.integration
def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".mlflow.db.1234.5678").write_text("unfinished")
    make_database(tmp_path / "mlflow.db")
    assert not (tmp_path / ".mlflow.db.1234.5678").exists()


@pytest.mark.integration
def test_who_waits_for_the_lock_takes_what_its_holder_made(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    waiting = threading.Thread(target=make_database, args=[path])
    with waiting_lock(tmp_path / ".mlflow.db.lock"):
        waiting.start()
        waiting.join(0.5)
        shutil.copy(made, path)
        file = path.stat().st_ino
    waiting.join()
    assert path.stat().st_ino == file


def test_one_that_is_stopped_as_it_is_filled_has_not_its_name_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(uri: str) -> None:
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow_database, "quiet_client", stopped)
    with pytest.raises(KeyboardInterrupt):
        make_database(tmp_path / "mlflow.db")
    assert [file.name for file in tmp_path.iterdir()] == [".mlflow.db.lock"]


def test_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_text("this is no database, but a file of somebody's")
    with pytest.raises(sqlite3.DatabaseError, match="file is not a database"):
        make_database(path)
    assert path.read_text().startswith("this is no database")


@pytest.mark.slow
def test_four_that_begin_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    assert [process.wait() for process in [maker(path) for _ in range(4)]] == [0] * 4
    assert is_made(path)
    assert not list(tmp_path.glob("*.half-made-*"))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_any_moment_of_its_birth(tmp_path: Path, sent: signal.Signals) -> None:
    """It is killed twice with each signal, at any moment from the first byte of the temporary file on."""
    rng = random.Random(int(sent))
    for number in range(2):
        path = tmp_path / str(number) / "mlflow.db"
        process = maker(path)
        while process.poll() is None and not list(path.parent.glob(".mlflow.db.[0-9]*")):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.0))
        if process.poll() is None:
            os.kill(process.pid, sent)
        process.wait()
        assert not path.exists() or is_made(path)
        make_database(path)
        assert is_made(path)
        assert not list(path.parent.glob("*.half-made-*"))
