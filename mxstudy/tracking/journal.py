"""The journal, metrics.jsonl: one JSON object per line, append-only, the authoritative record of a run.

{"step": 0, "loss": 5.5, "lr": 1e-4, ..., "time_s": ...}           a training row; steps count from 0
{"step": 0, "validation_loss": 5.4, "time_s": ...}                 a validation row
{"step": 0, "probe": "NAME", "values": {...}, "time_s": ...}       a probe's row
{"step": 0, "texts": [{...}, ...], "time_s": ...}                  what the model wrote after prompts
{"step": 0, "spike": {...}, "time_s": ...}                         a spike: loss, mean, std, ring, checkpoint
{"step": 2, "ring_error": "...", "time_s": ...}                    why a spike's ring was not written again
{"resumed_from": 7, "time_s": ...}                                 rows of steps >= 7 above this line are void
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mxstudy.whole_files import replacing

Row = dict[str, Any]


class Journal:
    """A writer that appends rows; a kill leaves at most one torn last line, which the next writer terminates."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, row: Row) -> None:
        """Write a row as one line, with the unix time in `time_s`; NaN and infinities as Python's json writes them."""
        line = (json.dumps({"time_s": time.time()} | row) + "\n").encode()
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, "the journal's line could not be written completely")

    def sync(self) -> None:
        """Make all rows so far survive a power failure."""
        os.fsync(self._file)

    def resumed_from(self, step: int) -> None:
        """Record that training continues at `step`, which supersedes all rows so far of this and later steps."""
        self.write({"resumed_from": step})

    def close(self) -> None:
        os.close(self._file)


def replace_journal(path: Path, rows: Iterable[Row]) -> None:
    """Replace a journal by these rows, or create it; a kill leaves the old journal or the new one."""
    with replacing(path) as temporary:
        journal = Journal(temporary)
        for row in rows:
            journal.write(row)
        journal.close()


def read_journal(path: Path) -> list[Row]:
    """Return the valid rows: those that no later resume supersedes. Torn lines are skipped."""
    return last_segments(read_rows(path)[0])


def read_rows(path: Path, start: int = 0) -> tuple[list[Row], int]:
    """Return the rows of complete lines from byte `start` on, superseded ones too, and the offset after the last."""
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    rows = []
    for line in lines:
        with suppress(ValueError):  # a torn line
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows, start + sum(len(line) + 1 for line in lines)


def first_missing(rows: list[Row], stop: int) -> int | None:
    """Return the first step below `stop` without a training row, or None if all have one."""
    trained = {row["step"] for row in rows if "loss" in row}
    return next((step for step in range(stop) if step not in trained), None)


def last_segments(rows: list[Row]) -> list[Row]:
    """Return the rows without those that a resume superseded, and without the `resumed_from` rows."""
    standing: list[Row] = []
    for row in rows:
        if "resumed_from" in row:
            standing = [kept for kept in standing if kept["step"] < row["resumed_from"]]
        else:
            standing.append(row)
    return standing
