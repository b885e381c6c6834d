"""Tables of jobs as text: the submitted jobs, their current state, and a live view until all have ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mxstudy.launch.queues import Queues
from mxstudy.launch.run_state import ENDED, RunState, look
from mxstudy.launch.ticket import ticket_of
from mxstudy.tracking.arms import Described, arms_of, described, run_names
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_rows
from mxstudy.train.progress import clock, rate_text

POLL_S = 2.0
TAIL_BYTES = 1 << 16  # read from the end of a journal: some hundred rows
LOSS_OF_STACK = "train/loss"
TOGETHER_S = 0.01  # rows closer than this belong to one batch of a stack; its last row is written when its step ends
ORDER = ("running", "preempted", "failed", "queued", "cancelled", "diverged", "finished")
COLUMNS = ("run", "what", "state", "step", "loss", "rate", "left", "job", "reason")


def show(folders: Sequence[RunFolder], what: Sequence[str]) -> None:
    """Print a table with a row per job: its id, or its state if it has ended, its name (`what`) and its folder."""
    rows = [["job", "what", "fingerprint", "folder"]]
    for folder, name in zip(folders, what, strict=True):
        state, ticket = folder.status().state, ticket_of(folder)
        job = ticket.job_id if ticket and state not in ENDED else state
        rows.append([job, name, folder.path.name, str(folder.path)])
    print("\n".join(aligned(rows)), flush=True)


def status_table(runs: Sequence[RunState], what: Sequence[str]) -> list[str]:
    """Return a line per run, runs that need attention first, and a line with the number of runs in each state.

    `what`: the name of each run.
    """
    name_of = {run.folder.path: name for run, name in zip(runs, what, strict=True)}
    ordered = sorted(runs, key=lambda run: ORDER.index(run.state))
    cells = (status_row(run) | {"what": name_of[run.folder.path]} for run in ordered)
    rows = [[row[column] for column in COLUMNS] for row in cells]
    return [*aligned([list(COLUMNS), *rows]), counted(ordered)]


def counted(runs: Sequence[RunState]) -> str:
    counts = Counter(run.state for run in runs)
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])


def status_row(run: RunState) -> dict[str, str]:
    """Return a run's cells by column, without its name; rate and time left come from the end of a running journal."""
    rows, status = last_rows(run.folder.journal_path), run.status
    steps = status.steps or 0
    rate = next((key for key in rows[-1] if key.endswith("_per_s")), None) if rows else None
    is_running = run.state == "running"
    return {
        "run": "/".join(run.folder.path.parts[-2:]),
        "state": run.state,
        "step": f"{status.step}/{steps}" if steps else "",
        "loss": f"{rows[-1]['loss']:.4f}" if rows else "",
        "rate": rate_text(rows[-1], rate) if is_running and rate else "",
        "left": clock(left_s(rows, steps)) if is_running and len(rows) > 1 else "",
        "job": run.ticket.job_id if run.ticket else "",
        "reason": run.reason or "",
    }


def left_s(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Return the seconds that the remaining steps will take at the pace of these rows."""
    return step_s(rows[0], rows[-1]) * (steps - 1 - rows[-1]["step"])


def step_s(first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    return float((last["time_s"] - first["time_s"]) / (last["step"] - first["step"]))


def last_rows(journal: Path) -> list[dict[str, Any]]:
    """Return the training rows at the end of the journal, only those after the last interruption."""
    try:
        tail, _ = read_rows(journal, max(0, journal.stat().st_size - TAIL_BYTES))  # its first line is mostly a torn one
    except OSError:
        return []
    rows: list[dict[str, Any]] = []
    for row in tail:
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
    """Return a row with the stack's median as loss, and its steps per second since the first of the earlier rows."""
    rate = {"steps_per_s": 1 / step_s(before[0], row)} if before else {}
    return {"step": row["step"], "time_s": row["time_s"], "loss": row["values"][LOSS_OF_STACK]} | rate


def wait_for(folders: Sequence[RunFolder]) -> list[RunState]:
    """Wait until no run is queued or running, and return their states.

    On a terminal a table is kept up to date; elsewhere each change of state is printed as a line.
    """
    console, states, what = Console(highlight=False), dict[Path, str](), names(folders)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            queues = Queues()
            runs = [look(folder, queues) for folder in folders]
            if console.is_terminal:
                live.update(Text("\n".join(status_table(runs, what)), no_wrap=True, overflow="crop"), refresh=True)
            else:
                for run, name in zip(runs, what, strict=True):
                    if states.get(run.folder.path) != run.state:
                        states[run.folder.path] = run.state
                        print("  ".join(filter(None, [run.state, name, run.reason])), flush=True)
            if not any(run.in_flight for run in runs):
                break
            time.sleep(POLL_S)
    print("\n".join(status_table(runs, what)), flush=True)
    return runs


def names(folders: Sequence[RunFolder]) -> list[str]:
    """Return the name of each run among these."""
    return names_by_kind([described(folder) for folder in folders])


def names_by_kind(runs: Sequence[Described]) -> list[str]:
    """Return the name of each run among those of its kind: that of its arm, and its seeds where they differ.

    Among runs of other kinds a name would also have the keys that its own kind lacks.
    """
    found: dict[int, str] = {}
    for kind in {run.config.get("study") for run in runs}:
        numbers = [number for number, run in enumerate(runs) if run.config.get("study") == kind]
        own = [runs[number] for number in numbers]
        found |= zip(numbers, run_names(own, arms_of(own)), strict=True)
    return [found[number] for number in range(len(runs))]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns; the first row is the header, and empty columns are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    padded = [[entry.ljust(max(map(len, column))) for entry in column] for column in columns]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
