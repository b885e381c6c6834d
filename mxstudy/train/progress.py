"""Live progress on the terminal; plain lines where there is none."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, TextIO

PLAIN_EVERY_S, TERMINAL_EVERY_S = 10.0, 0.1


class Progress:
    """One line that rewrites itself on a terminal; in a log, a line now and then."""

    def __init__(self, label: str, steps: int, start: int, stream: TextIO = sys.stderr) -> None:
        self.label, self.steps, self.start, self.stream = label, steps, start, stream
        self.is_terminal = stream.isatty()
        self.began_s, self.shown_s = time.perf_counter(), 0.0

    def show(self, row: dict[str, Any]) -> None:
        now_s, done = time.perf_counter(), row["step"] + 1
        every_s = TERMINAL_EVERY_S if self.is_terminal else PLAIN_EVERY_S
        if now_s - self.shown_s < every_s and done < self.steps:
            return
        self.shown_s = now_s
        left_s = (now_s - self.began_s) / (done - self.start) * (self.steps - done)
        line = (
            f"{self.label}  step {done}/{self.steps}  loss {row['loss']:.4f}"
            f"  {row['tokens_per_s']:,.0f} tokens/s  {clock(left_s)} left"
        )
        if self.is_terminal:
            columns = shutil.get_terminal_size().columns
            line = f"\r\033[K{line[: columns - 1]}"  # a longer one would wrap, and leave its first half behind
        self.stream.write(line + ("\n" if not self.is_terminal or done == self.steps else ""))
        self.stream.flush()


def clock(seconds: float) -> str:
    """65 -> 1:05"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
