"""Runs end well when a signal comes late or a server is away."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tracked import make_folder

from mxstudy.train import recorder as ending
from mxstudy.train.recorder import Recorder, finish_and_mirror, record_end
from mxstudy.train.signals import Leave, received_signals


class Slow(Recorder):
    """A mirror that takes so long that somebody sends a signal."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def end(self, state: str, reason: str | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("state", "why"), [("finished", None), ("diverged", "loss nan at step 7")])
def test_a_signal_that_comes_too_late_is_no_reason_but_is_known(tmp_path: Path, state: str, why: str | None) -> None:
    """It comes while the mirror takes its time, or before."""
    folder = make_folder(tmp_path)
    folder.update(state="preempted", reason="SIGTERM")
    with received_signals() as received, Leave() as leave:
        record_end(Slow(folder), folder, state, why, leave)
        record_end(Slow(folder), folder, state, why, leave)
    assert (folder.status().state, folder.status().reason) == (state, why)
    assert received == [signal.SIGTERM]


def test_a_signal_is_the_reason_of_a_run_that_it_stopped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with Leave() as leave:
        os.kill(os.getpid(), signal.SIGUSR2)
        record_end(Slow(folder), folder, "preempted", None, leave)
    assert (folder.status().state, folder.status().reason) == ("preempted", "SIGUSR2")


def test_the_journal_is_on_disk_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    done: list[str] = []
    recorder = Slow(make_folder(tmp_path))
    recorder.journal = SimpleNamespace(sync=lambda: done.append("journal"))
    recorder.checkpoints = SimpleNamespace(save=lambda *_: done.append("checkpoint"))
    recorder.tensors, recorder.mirror = dict, None
    recorder.save(3)
    assert done == ["journal", "checkpoint"]


@pytest.mark.parametrize("away", [None, "URI: ConnectionRefusedError"])
def test_a_server_that_is_away_is_a_line_and_is_told_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], away: str | None
) -> None:
    class Mirror:
        def start(self) -> None:
            pass

        def finish(self, state: str) -> str | None:
            assert folder.status().state == state == "finished"
            return away

    folder, tellings = make_folder(tmp_path), []
    monkeypatch.setattr(ending, "mirror_of", lambda *of: Mirror())
    finish_and_mirror(folder.config(), folder, "label", lambda: tellings.append(1))
    assert len(tellings) == (away is None)
    assert capsys.readouterr().out == (f"tracking: {away}; everything is in {folder.path}\n" if away else "")
