from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from tracked import make_folder

from benchmarks.mlflow_server import Server
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_store import create_store


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database takes two seconds to make, and none to copy."""
    path, said = tmp_path_factory.mktemp("store") / "new" / "mlflow.db", io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        assert create_store(f"sqlite:///{path}") is None
    assert said.getvalue() == ""
    return path


@pytest.fixture
def uri(tmp_path: Path, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path / "runs")


@pytest.fixture
def server(tmp_path: Path, empty_store: Path) -> Iterator[Server]:
    started = Server(tmp_path, empty_store)
    yield started
    started.kill()
