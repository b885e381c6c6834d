"""Jobs as a table of text: what was submitted, how they are, and both again and again until they have ended."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mxstudy.launch.queues import Queues
from mxstudy.launch.run_state import ENDED, RunState, look
from mxstudy.launch.ticket import ticket_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.progress import clock, rate_text

POLL_S = 2.0
TAIL_BYTES = 1 << 16  # of a journal: some hundred rows
LOSS_OF_STACK = "train/loss"
TOGETHER_S = 0.01  # a stack's rows are written some at a time, and the last of them when its step is done
ORDER = ("running", "preempted", "failed", "queued", "cancelled", "diverged", "finished")
COLUMNS = ("run", "what", "state", "step", "loss", "rate", "left", "job", "reason")


def show(folders: Sequence[RunFolder]) -> None:
    """Where a launch leaves each of its jobs: the id of the job that has it, or how it ended."""
    rows = [["job", "what", "fingerprint", "folder"]]
    for folder in folders:
        state, ticket = folder.status().state, ticket_of(folder)
        job = ticket.job_id if ticket and state not in ENDED else state
        rows.append([job, label_of(folder), folder.path.name, str(folder.path)])
    print("\n".join(aligned(rows)), flush=True)


def status_table(seen: Iterable[RunState]) -> list[str]:
    """A line a run, those first that somebody may want to do something about; and how many are in which state."""
    ordered = sorted(seen, key=lambda one: ORDER.index(one.state))
    rows = [[row[column] for column in COLUMNS] for row in map(status_row, ordered)]
    return [*aligned([list(COLUMNS), *rows]), counted(ordered)]


def counted(seen: Sequence[RunState]) -> str:
    counts = Counter(one.state for one in seen)
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])


def status_row(one: RunState) -> dict[str, str]:
    """Rate and time left, of what runs, are those of the last rows of its journal."""
    rows, status = last_rows(one.folder.journal_path), one.status
    steps = status.steps or 0
    rate = next((key for key in rows[-1] if key.endswith("_per_s")), None) if rows else None
    runs = one.state == "running"
    return {
        "run": "/".join(one.folder.path.parts[-2:]),
        "what": label_of(one.folder),
        "state": one.state,
        "step": f"{status.step}/{steps}" if steps else "",
        "loss": f"{rows[-1]['loss']:.4f}" if rows else "",
        "rate": rate_text(rows[-1], rate) if runs and rate else "",
        "left": clock(left_s(rows, steps)) if runs and len(rows) > 1 else "",
        "job": one.ticket.job_id if one.ticket else "",
        "reason": one.reason or "",
    }


def left_s(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    return step_s(rows[0], rows[-1]) * (steps - 1 - rows[-1]["step"])


def step_s(first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    return float((last["time_s"] - first["time_s"]) / (last["step"] - first["step"]))


def last_rows(journal: Path) -> list[dict[str, Any]]:
    """Of the training: those at the end of the journal, as far as they follow each other without an interruption."""
    rows: list[dict[str, Any]] = []
    with suppress(OSError), journal.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        for line in file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]:
            with suppress(ValueError):  # a torn line
                row = json.loads(line)
                if "resumed_from" in row:
                    rows = []
                elif "loss" in row:
                    rows.append(row)
                elif LOSS_OF_STACK in row.get("values", ()):
                    if rows and row["time_s"] - rows[-1]["time_s"] < TOGETHER_S:
                        rows.pop()
                    rows.append(stack_row(row, rows))
    return rows


def stack_row(row: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A stack's median as the loss, and its pace since the first of the rows before."""
    rate = {"steps_per_s": 1 / step_s(before[0], row)} if before else {}
    return {"step": row["step"], "time_s": row["time_s"], "loss": row["values"][LOSS_OF_STACK]} | rate


def wait_for(folders: Sequence[RunFolder]) -> list[RunState]:
    """Until none of them is queued or running; the table rewrites itself on a terminal, elsewhere changes are lines."""
    console, states = Console(highlight=False), dict[Path, str]()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            queues = Queues()
            seen = [look(folder, queues) for folder in folders]
            if console.is_terminal:
                live.update(Text("\n".join(status_table(seen)), no_wrap=True, overflow="crop"), refresh=True)
            else:
                for one in seen:
                    if states.get(one.folder.path) != one.state:
                        states[one.folder.path] = one.state
                        print("  ".join(filter(None, [one.state, label_of(one.folder), one.reason])), flush=True)
            if not any(one.in_flight for one in seen):
                break
            time.sleep(POLL_S)
    print("\n".join(status_table(seen)), flush=True)
    return seen


def label_of(folder: RunFolder) -> str:
    return str(folder.provenance()["label"])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest entry; the first row is their names, and one without entries is left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    padded = [[entry.ljust(max(map(len, column))) for entry in column] for column in columns]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
