"""Leaving in time: a signal sets a flag, the loop finishes its step, saves, and goes."""

from __future__ import annotations

import signal
from signal import Signals
from types import FrameType
from typing import Any

import torch

from mxstudy.distributed import max_over_ranks, world_size

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class Leave:
    """Within the block, SIGTERM, SIGUSR2 and Ctrl-C only set `signal`; afterwards the old handlers stand again.

    Of several ranks each has what it was sent itself, and leaves for what `agree` returns alone.
    """

    signal: Signals | None = None

    def __enter__(self) -> Leave:
        self._handlers: dict[int, Any] = {number: signal.signal(number, self._set) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def agree(self) -> Signals | None:
        """What any rank was sent, in all of them: Slurm may signal one alone, and they can only leave together.

        A signal that comes while the ranks talk waits for the next time.
        """
        if world_size() == 1:
            return self.signal
        number = int(max_over_ranks(torch.tensor(self.signal or 0)))
        if number:
            self.signal = Signals(number)
        return self.signal if number else None

    def _set(self, number: int, _: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.signal = Signals(number)
