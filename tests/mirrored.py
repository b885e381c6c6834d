"""Mirror a run to MLflow, and return what has arrived there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from mxstudy.reader import flatten, plain
from mxstudy.tracking import mlflow_mirror as module
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.mlflow_mirror import Mirror
from mxstudy.tracking.mlflow_store import connect

ARTIFACTS = ["config.yaml", "metrics.jsonl", "provenance.json", "status.json"]


def mirror(uri: str, folder: RunFolder, **changes: Any) -> Mirror:
    settings: dict[str, Any] = {
        "experiment": "quick",
        "run_name": "norm=mxnorm_p2",
        "params": flatten(plain(folder.config())),
        "tags": {"norm": "mxnorm_p2", "study": "pretrain"},
    }
    return Mirror(uri, folder, **settings | changes)


def send(uri: str, folder: RunFolder, state: str = "finished", covered: int = 0, **changes: Any) -> Mirror:
    follower = mirror(uri, folder, **changes)
    follower.start()
    follower.covered(covered)
    assert follower.finish(state) is None
    return follower


def the_run(uri: str) -> Any:
    (run,) = connect(uri).search_runs(["1"])
    return run


def points(uri: str, name: str = "train/loss") -> list[tuple[int, float]]:
    history = connect(uri).get_metric_history(the_run(uri).info.run_id, name)
    return sorted((point.step, point.value) for point in history)


def losses(folder: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_journal(folder.journal_path) if "loss" in row]


def met_by_another(found: Callable[..., Any]) -> Callable[..., Any]:
    """Return `found` for two threads, each of which waits up to a second until the other one has its answer as well."""
    both = threading.Barrier(2)

    def slow(*asked: Any) -> Any:
        answer = found(*asked)
        with suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        return answer

    return slow


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == module.__name__]
