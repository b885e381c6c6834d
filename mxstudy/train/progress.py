"""Live progress: one line that rewrites itself on a terminal, whole lines now and then in a log or a Slurm file."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

PLAIN_EVERY_S, TERMINAL_EVERY_S = 30.0, 0.1


class Progress:
    """Nothing but plain text and newlines goes to a stream that is no terminal. `rate`: a row's key, X_per_s."""

    def __init__(self, label: str, steps: int, stream: TextIO | None = None, rate: str = "tokens_per_s") -> None:
        self.label, self.steps, self.stream, self.rate = label, steps, stream or sys.stderr, rate
        self.is_terminal = self.stream.isatty()
        self.first: tuple[int, float] | None = None  # step and time: the first step compiles, and tells nothing
        self.shown_s = 0.0
        self.is_open = False  # the terminal's line has not ended

    def show(self, row: dict[str, Any]) -> None:
        """`row`: of the journal, of a step just done."""
        now_s, done = time.perf_counter(), row["step"] + 1
        self.first = self.first or (done, now_s)
        every_s = TERMINAL_EVERY_S if self.is_terminal else PLAIN_EVERY_S
        if now_s - self.shown_s < every_s and done < self.steps:
            return
        self.shown_s = now_s
        line = (
            f"{self.label}  step {done}/{self.steps}  loss {row['loss']:.4f}"
            f"  {rate_text(row, self.rate)}{self.left(done, now_s)}"
        )
        if self.is_terminal:
            columns = shutil.get_terminal_size().columns
            self.stream.write(f"\r\033[K{line[: columns - 1]}")  # a longer one would wrap, and leave its first half
        else:
            self.stream.write(f"{line}\n")
        self.stream.flush()
        self.is_open = self.is_terminal
        if done == self.steps:
            self.close()

    def left(self, done: int, now_s: float) -> str:
        """At the pace since the first step that was shown; nothing is known at that step."""
        assert self.first is not None
        step, time_s = self.first
        return f"  {clock((now_s - time_s) / (done - step) * (self.steps - done))} left" if done > step else ""

    def close(self) -> None:
        """Ends the terminal's line, so that what is printed next has one of its own."""
        if self.is_open:
            self.stream.write("\n")
            self.stream.flush()
        self.is_open = False


def rate_text(row: Mapping[str, Any], key: str) -> str:
    """1234.5 tokens_per_s -> '1,234 tokens/s'"""
    return f"{row[key]:,.0f} {key.replace('_per_', '/').replace('_', ' ')}"


def clock(seconds: float) -> str:
    """65 -> 1:05"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
