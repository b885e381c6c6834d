"""A server that accepts calls and answers none is known to the whole process, and costs the time of one call."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirrored import losses, mirror, points
from tracked import make_folder, training_row, write_rows

from mxstudy.compat.mlflow import ENVIRONMENT, quiet_mlflow
from mxstudy.tracking import mlflow_mirror, silence
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_mirror import add_rows
from mxstudy.tracking.mlflow_store import create_store
from mxstudy.tracking.silence import answers_of

ASKED_S = 1  # before a call is given up
pytestmark = pytest.mark.integration


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a server that accepts connections and answers none."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(ASKED_S))
    monkeypatch.setattr(silence, "SILENT_S", ASKED_S - 0.2)
    quiet_mlflow()  # the import takes seconds
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = make_folder(tmp_path / "runs")
    write_rows(made, [training_row(step) for step in range(5)])
    return made


def waited(uri: str, folder: RunFolder) -> tuple[float, str]:
    """Return how long a run waits at its end, and what it says."""
    follower = mirror(uri, folder)
    follower.start()
    began_s = time.monotonic()
    problem = follower.finish("finished")
    assert problem is not None
    return time.monotonic() - began_s, problem


def test_a_timeout_is_longer_than_what_counts_as_silence() -> None:
    assert silence.SILENT_S < float(ENVIRONMENT["MLFLOW_HTTP_REQUEST_TIMEOUT"]) < silence.FORGET_S


def test_a_run_waits_for_one_call_and_those_after_it_for_none(silent: str, tmp_path: Path, folder: RunFolder) -> None:
    first_s, said = waited(silent, folder)
    assert (first_s < ASKED_S + 2, said) == (True, f"{silent}: TimeoutError: timed out")
    second_s, said = waited(silent, make_folder(tmp_path / "runs", "a" * 64))
    assert (second_s < ASKED_S / 2, said) == (True, f"{silent}: does not answer")


def test_what_was_not_sent_is_caught_up_with(silent: str, uri: str, folder: RunFolder) -> None:
    waited(silent, folder)
    folder.update(state="finished")
    assert mirror(uri, folder).catch_up() is None
    assert points(uri) == losses(folder)


def test_a_store_that_does_not_answer_is_known_from_any_call(
    silent: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "timed out" in str(create_store(silent))
    assert answers_of(silent).is_silent
    assert waited(silent, folder)[0] < ASKED_S / 2
    with pytest.raises(TimeoutError, match="it does not answer"):
        answers_of(silent).check()
    monkeypatch.setattr(mlflow_mirror, "position_of", lambda folder, uri: mlflow_mirror.Position(uri, "an-id"))
    began_s = time.monotonic()
    assert add_rows(silent, folder, [training_row(0)]) == f"{silent}: TimeoutError: it does not answer"
    assert time.monotonic() - began_s < ASKED_S / 2


def test_a_call_that_is_answered_or_a_while_without_one_ends_it(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_store(silent)
    monkeypatch.setattr(silence, "FORGET_S", 0.0)
    assert not answers_of(silent).is_silent
    monkeypatch.setattr(silence, "FORGET_S", 60.0)
    assert answers_of(silent).is_silent
    with pytest.raises(ConnectionRefusedError), answers_of(silent).asking():
        raise ConnectionRefusedError  # an answer, because such a server may just be starting
    assert not answers_of(silent).is_silent


def test_calls_that_time_out_between_others_are_no_silence(silent: str) -> None:
    """A busy server carries out calls that were given up, and gets them again."""
    for _ in range(3):
        with pytest.raises(TimeoutError), answers_of(silent).asking():
            raise TimeoutError
        assert not answers_of(silent).is_silent
