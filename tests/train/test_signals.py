import os
import signal
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
