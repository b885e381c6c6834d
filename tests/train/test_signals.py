import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from gang import together

from mxstudy.distributed import rank
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.process_group import process_group
from mxstudy.train.signals import Leave


def told_in_between(folder: Path) -> list[tuple[int | None, int | None]]:
    """Return what is agreed, and what was sent, three times.

    The second rank is told while it waits for the first's word.
    """
    found: list[tuple[int | None, int | None]] = []
    with process_group(torch.device("cpu"), RunFolder(folder)), Leave() as leave:
        for turn in range(3):
            if turn == 1 and rank() == 1:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            if turn == 1 and rank() == 0:
                threading.Event().wait(2)
            agreed = leave.agree()
            found.append((agreed, leave.signal))
    return found


@pytest.mark.slow
def test_a_signal_that_comes_while_the_ranks_talk_is_not_lost_and_not_one_ranks_alone(tmp_path):
    told = signal.SIGUSR2
    assert together(tmp_path, 2, told_in_between, tmp_path) == [
        [(None, None), (None, None), (told, told)],
        [(None, None), (None, told), (told, told)],
    ]


def test_a_process_alone_agrees_with_itself():
    with Leave() as leave:
        assert leave.agree() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert leave.agree() == signal.SIGTERM


IN_A_TERMINAL = """
import os, signal, sys
from mxstudy.train.signals import Leave
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have begun them with nohup
with Leave() as leave:
    print("ready", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGHUP)
    print("after the terminal has closed", flush=True)
    sys.exit(100 + (leave.agree() or 0))  # an exception, as of a print that fails, would exit with 1, as SIGHUP is
"""


@pytest.mark.integration
def test_a_terminal_that_closes_stops_a_run_in_time_which_may_still_print():
    """Such a run was killed once, and lost all steps since its last checkpoint."""
    outside, terminal = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal) as run:
        os.close(terminal)
        said = b""
        while not said.endswith(b"\n"):  # a terminal may hand on a line in parts
            said += os.read(outside, 100)
        assert said == b"ready\r\n"
        os.close(outside)
        run.communicate(b"\n")
    assert run.returncode == 100 + signal.SIGHUP


@pytest.mark.integration
def test_the_reader_of_the_output_may_end_with_the_terminal():
    """Close the pipe before the signal comes, as `tee` may in `python -m mxstudy ... | tee log`."""
    command = [sys.executable, "-c", IN_A_TERMINAL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        run.stdout.close()
        run.stdin.write(b"\n")
    assert run.returncode == 100 + signal.SIGHUP


@pytest.mark.integration
def test_a_file_of_the_output_stays_one(tmp_path):
    with (tmp_path / "log").open("w") as log:
        run = subprocess.run([sys.executable, "-c", IN_A_TERMINAL], input=b"\n", stdout=log)
    assert run.returncode == 100 + signal.SIGHUP
    assert (tmp_path / "log").read_text().splitlines() == ["ready", "after the terminal has closed"]


def test_under_nohup_a_terminal_that_closes_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Leave() as leave:
            os.kill(os.getpid(), signal.SIGHUP)
            assert leave.agree() is None
    finally:
        signal.signal(signal.SIGHUP, before)
