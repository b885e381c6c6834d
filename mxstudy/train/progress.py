"""Show live progress: one line that is rewritten in place on a terminal, a new line every 30 s in a log file."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

PLAIN_EVERY_S, TERMINAL_EVERY_S = 30.0, 0.1


class Progress:
    """Shows a run's progress; a stream that is not a terminal gets only plain text lines.

    `rate`: the key of a row's rate, such as tokens_per_s.
    """

    def __init__(self, label: str, steps: int, stream: TextIO | None = None, rate: str = "tokens_per_s") -> None:
        self.label, self.steps, self.stream, self.rate = label, steps, stream or sys.stderr, rate
        self.is_terminal = self.stream.isatty()
        # step and time of the first row: it compiles, so its duration is not used
        self.first: tuple[int, float] | None = None
        self.shown_s = 0.0
        self.is_open = False  # whether the terminal's line still lacks its line break

    def show(self, row: dict[str, Any]) -> None:
        """Show the journal's row of a step just done, unless the last line is too recent."""
        now_s, done = time.perf_counter(), row["step"] + 1
        self.first = self.first or (done, now_s)
        if self.is_due(now_s) or done == self.steps:
            rate = f"{rate_text(row, self.rate)}{self.left(done, now_s)}"
            self.write(f"step {done}/{self.steps}  loss {row['loss']:.4f}  {rate}", now_s)
        if done == self.steps:
            self.close()

    def show_part(self, what: str, done: int, total: int) -> None:
        """Show how much of a measurement between two steps is done, unless the last line is too recent."""
        now_s = time.perf_counter()
        if self.is_due(now_s) or done == total:
            self.write(f"{what}  {done / total:.0%} done", now_s)

    def is_due(self, now_s: float) -> bool:
        return now_s - self.shown_s >= (TERMINAL_EVERY_S if self.is_terminal else PLAIN_EVERY_S)

    def write(self, text: str, now_s: float) -> None:
        """Write a line that begins with the label, cut to fit: in place on a terminal, else whole, below the others."""
        self.shown_s = now_s
        if self.is_terminal:
            room = shutil.get_terminal_size().columns - 1  # a longer line would wrap and could not be rewritten
            label = self.label[: max(room - len(text) - 2, 0)]
            self.put(f"\r\033[K{f'{label}  {text}'[:room]}")
        else:
            self.put(f"{self.label}  {text}\n")
        self.is_open = self.is_terminal

    def left(self, done: int, now_s: float) -> str:
        """Return the time left at the pace since the first row, e.g. '  1:05 left', or '' at that row."""
        assert self.first is not None
        step, time_s = self.first
        return f"  {clock((now_s - time_s) / (done - step) * (self.steps - done))} left" if done > step else ""

    def close(self) -> None:
        """End the terminal's line, so that the next output starts on a new one."""
        if self.is_open:
            self.put("\n")
        self.is_open = False

    def put(self, text: str) -> None:
        """Write the text, if the stream can still be written to: a terminal that has closed ends no training."""
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


def rate_text(row: Mapping[str, Any], key: str) -> str:
    """Return a row's rate as text, e.g. '1,234 tokens/s' for 1234.5 under the key tokens_per_s."""
    return f"{row[key]:,.0f} {key.replace('_per_', '/').replace('_', ' ')}"


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss, e.g. '1:05' for 65."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
