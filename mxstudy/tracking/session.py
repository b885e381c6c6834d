"""A run's folder as a run in MLflow, open for what is sent: call by call, each of which may fail and be tried again.

Points carry the journal's own timestamps, and a point that MLflow gets twice it keeps once. So `mirror.json` (which
MLflow run, up to which step) may lag behind what has arrived, and a kill at any moment doubles nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxstudy.tracking.folder import RunFolder, replace_file
from mxstudy.tracking.journal import Row, last_segments, read_rows
from mxstudy.tracking.metrics import allowed, metrics_of
from mxstudy.tracking.mlflow_run import PARENT, TEXT_LENGTH, active_run

METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # MLflow's limits

# What MLflow calls the state in which a run ends.
STATES = {
    "finished": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
    "cancelled": "KILLED",
}
GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # a run that is not there; one that was deleted


@dataclass(frozen=True)
class Position:
    """mirror.json: every row of a step below `next_step` is in that run; `state` is what MLflow was last told."""

    uri: str
    run_id: str
    next_step: int = 0
    state: str = "running"


def position_of(folder: RunFolder, uri: str) -> Position | None:
    """How far that store has the run; None if it has nothing of it."""
    path = folder.path / "mirror.json"
    position = Position(**json.loads(path.read_text())) if path.exists() else None
    return position if position and position.uri == uri else None


class Session:
    """Rows are read once, and their points wait here until a call with them has succeeded."""

    def __init__(self, client: Any, folder: RunFolder, position: Position) -> None:
        self.client, self.folder, self.position = client, folder, position
        self.offset, self.uncovered, self.spikes = 0, list[Row](), 0
        self.points: list[Any] = []

    def begin(self, known: Mapping[str, str], tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Says that it runs. `known`, `tags`: params and tags that MLflow has of it."""
        from mlflow.entities import Param

        run_id = self.position.run_id
        # those of an earlier start stay: MLflow refuses to change a param
        texts = {allowed(key): str(value)[:TEXT_LENGTH] for key, value in params.items()}
        missing = [Param(key, value) for key, value in texts.items() if key not in known]
        for batch in chunks(missing, PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=batch)
        parent_id = self.folder.status().mlflow_parent_id
        if parent_id and PARENT not in tags and active_run(self.client, parent_id):
            self.client.set_tag(run_id, PARENT, parent_id)
        if (backend := self.folder.backend()) and tags.get("backend") != backend:  # it went on elsewhere
            self.client.set_tag(run_id, "backend", backend)
        self.client.set_tag(run_id, "status", "running")
        self.client.update_run(run_id, status="RUNNING")
        self.keep(state="running")
        self.folder.update(mlflow_run_id=run_id)

    def send(self, limit: float) -> bool:
        """One call with what the journal has of steps below `limit`; True if there was no more of it.

        Those steps are never superseded.
        """
        read = not self.points  # what waits goes first, else an outage would fill the memory
        if read:
            self._read(limit)
        batch = self.points[:METRICS_PER_CALL]
        if batch:
            self.client.log_batch(self.position.run_id, metrics=batch)
            del self.points[: len(batch)]
            cut = bool(self.points) and self.points[0].step == batch[-1].step  # the rest of a step is in the next batch
            self.keep(next_step=batch[-1].step + (not cut))
        return read and not self.points

    def end(self, state: str, reason: str | None) -> None:
        run_id = self.position.run_id
        for path in self.folder.artifacts():
            inside = path.parent.relative_to(self.folder.path).as_posix()
            self.client.log_artifact(run_id, str(path), None if inside == "." else inside)
        self.client.set_tag(run_id, "status", state)
        if reason:
            self.client.set_tag(run_id, "reason", reason[:TEXT_LENGTH])
        ended_ms = int(self.folder.journal_path.stat().st_mtime * 1000)
        self.client.set_terminated(run_id, STATES[state], end_time=ended_ms)
        self.keep(state=state)

    def keep(self, **changes: Any) -> None:
        self.position = dataclasses.replace(self.position, **changes)
        replace_file(self.folder.path / "mirror.json", json.dumps(dataclasses.asdict(self.position)))

    def _read(self, limit: float) -> None:
        """Points of rows that stand for good, without those that were sent; none of the spikes has been counted."""
        new, self.offset = read_rows(self.folder.journal_path, self.offset)
        rows = last_segments(self.uncovered + new)
        self.uncovered = [row for row in rows if row["step"] >= limit]
        for row in rows:
            if row["step"] < limit:
                self.spikes += "spike" in row
                if row["step"] >= self.position.next_step:
                    self.points += points_of(row, self.spikes)


def points_of(row: Row, spikes: int = 0) -> list[Any]:
    """A row as MLflow's metrics, with the row's own time."""
    from mlflow.entities import Metric

    return [Metric(name, value, int(row["time_s"] * 1000), row["step"]) for name, value in metrics_of(row, spikes)]


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
