from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tracked import make_folder

from benchmarks.mlflow_server import Server
from mxstudy.tracking.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path / "runs")


@pytest.fixture
def server(tmp_path: Path, uri: str) -> Iterator[Server]:
    started = Server(tmp_path, uri)
    yield started
    started.kill()
