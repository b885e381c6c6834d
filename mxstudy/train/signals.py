"""Stop a run in time: a signal sets a flag, and the loop finishes its step, saves a checkpoint and returns."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from signal import Signals
from types import FrameType
from typing import Any

import torch

from mxstudy.distributed import max_over_ranks, world_size

_received: ContextVar[list[Signals] | None] = ContextVar("received", default=None)


def stopping() -> tuple[Signals, ...]:
    """Return the signals, beside Ctrl-C, that ask to stop: under nohup a terminal that closes does not."""
    always, is_under_nohup = (signal.SIGTERM, signal.SIGUSR2), signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return always if is_under_nohup else (*always, signal.SIGHUP)


def leave_closed_terminal() -> None:
    """Print nowhere from now on, where output went to a terminal that has closed, or to `tee` in it, which has ended.

    To write there would be an error.
    """
    for stream in (1, 2):
        watched = select.poll()
        watched.register(stream, 0)  # errors are reported always
        if watched.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class Leave:
    """Make Ctrl-C and `stopping` signals only set `signal` within the block; afterwards the old handlers are restored.

    With several ranks, `signal` is what this rank received itself; a rank stops only for a signal that `agree` returns.
    """

    signal: Signals | None = None

    def __enter__(self) -> Leave:
        self._handlers: dict[int, Any] = {
            number: signal.signal(number, self._set) for number in (*stopping(), signal.SIGINT)
        }
        return self

    def __exit__(self, *_: object) -> None:
        received = _received.get()
        if self.signal and received is not None:
            received.append(self.signal)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def agree(self) -> Signals | None:
        """Return, on every rank, a signal that any rank received, or None; all ranks must call it.

        Slurm may signal only one rank, but ranks can only stop together. A signal that comes during the exchange
        waits for the next call.
        """
        if world_size() == 1:
            return self.signal
        number = int(max_over_ranks(torch.tensor(self.signal or 0)))
        if number:
            self.signal = Signals(number)
        return self.signal if number else None

    def _set(self, number: int, _: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt  # a second Ctrl-C ends the run at once
        if number == signal.SIGHUP:
            leave_closed_terminal()
        self.signal = Signals(number)


@contextmanager
def received_signals() -> Iterator[list[Signals]]:
    """Collect the signals that trainings in the block receive, perhaps too late to stop them."""
    received: list[Signals] = []
    token = _received.set(received)
    try:
        yield received
    finally:
        _received.reset(token)
