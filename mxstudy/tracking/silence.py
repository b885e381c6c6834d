"""Notice a silent tracking server: it accepts calls and answers none, so each call costs a whole timeout.

All runs and sweeps of a process share what one call has found out, and do not wait for an answer at their end.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mxstudy.reader import root_of

SILENT_S = 25.0  # without an answer; a busy SQLite lets a call wait for 20 s
FORGET_S = 60.0  # after a call without an answer, until the next call may find the server restored


class Answers:
    """Record whether a store answers what this process asks it. Times are those of `time.monotonic`.

    `answered_s`: that of its last answer, or of the first question. `missed_s`: that of the last call without an
    answer.
    """

    def __init__(self) -> None:
        self.answered_s, self.missed_s = time.monotonic(), -math.inf

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note whether the store answers the calls of the block; a refusal is an answer."""
        try:
            yield
        except Exception as error:
            if isinstance(root_of(error), TimeoutError):
                self.missed_s = time.monotonic()
            else:
                self.answered_s = time.monotonic()
            raise
        self.answered_s = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Return whether the store has answered no call for a while, and the last such call is recent."""
        return time.monotonic() < self.missed_s + FORGET_S and self.missed_s - self.answered_s > SILENT_S

    def check(self) -> None:
        """Raise TimeoutError if the store is silent."""
        if self.is_silent:
            raise TimeoutError("it does not answer")


@functools.cache  # shared by the runs and sweeps of a process
def answers_of(uri: str) -> Answers:
    return Answers()
