"""The mirror: a thread that sends the journal to MLflow, in batches. The journal is the truth, and loses nothing.

Sent is what a durable checkpoint covers, and everything once a run is done: a step that was sent is never superseded.
Points carry the journal's own timestamps, and a point that MLflow gets twice it keeps once. So `mirror.json` (which
MLflow run, up to which step) may lag behind what has arrived, and a kill at any moment doubles nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mxstudy.config import Run
from mxstudy.reader import flatten, plain
from mxstudy.tracking.folder import RunFolder, replace_file
from mxstudy.tracking.journal import Row, last_segments, read_rows
from mxstudy.tracking.metrics import allowed, metrics_of
from mxstudy.tracking.mlflow_run import (
    PARENT,
    TEXT_LENGTH,
    active_run,
    check_uri,
    connect,
    create_run,
    find_run,
    get_experiment,
    identity,
    origin,
)

log = logging.getLogger(__name__)

METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # MLflow's limits
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0  # between attempts while the server is away
LAST_CHANCE_S = 10.0  # what a run waits at its end for a server that is away

# What MLflow calls the state in which a run ends.
STATES = {
    "finished": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
    "cancelled": "KILLED",
}
TAGS = ("experiment", "study", "seed", "data_seed")  # of a config, beside its choices: model, norm, precision, ...
DONE = ("finished", "diverged")  # no step can be superseded any more


def create_store(uri: str) -> str | None:
    """Opens a store once, before jobs do: eight processes at once break an SQLite database that is not there yet.

    Returns None, or in one line why it cannot be used now. Raises ConfigError as check_uri.
    """
    check_uri(uri)
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:
        return one_line(uri, error)
    return None


def add_rows(uri: str, folder: RunFolder, rows: list[Row]) -> str | None:
    """Into the run that this store has of a folder, if it has one: what was measured of it after its end.

    Rows that are sent twice are there once. Returns None, or in one line why they are not there.
    """
    from mlflow.entities import Metric

    position = position_of(folder, uri)
    if position is None:
        return None
    metrics = [
        Metric(name, value, int(row["time_s"] * 1000), row["step"]) for row in rows for name, value in metrics_of(row)
    ]
    try:
        client = connect(uri)
        for batch in chunks(metrics, METRICS_PER_CALL):
            client.log_batch(position.run_id, metrics=batch)
    except Exception as error:  # whatever a server or a driver comes up with
        return one_line(uri, error)
    return None


def one_line(uri: str, error: BaseException) -> str:
    """What is at the bottom of it: 'Connection refused', not the four layers above."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{uri}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


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


@dataclass
class Session:
    """What is known while calls succeed; dropped when one fails, and had again from mirror.json and the journal."""

    client: Any
    position: Position
    offset: int = 0
    uncovered: list[Row] = field(default_factory=list)
    spikes: int = 0


class Mirror:
    """The training thread tells it what is covered, and waits for it only in `finish`."""

    def __init__(
        self,
        uri: str,
        folder: RunFolder,
        experiment: str,
        run_name: str,
        params: dict[str, Any],
        tags: dict[str, str],
    ) -> None:
        """`params`: the flattened config; `tags` go beside those of provenance."""
        self.uri, self.folder, self.experiment, self.run_name = uri, folder, experiment, run_name
        self.params, self.tags = params, tags
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._wake = threading.Event()
        self._session: Session | None = None
        self._covered = 0
        self._final: str | None = None
        self._reason: str | None = None
        self._problem: str | None = None
        self._gave_up = False

    def start(self) -> None:
        self._wake.set()
        self._thread.start()

    def covered(self, step: int) -> None:
        """There is a durable checkpoint at `step`: rows of the steps below may be sent."""
        self._covered = step
        self._wake.set()

    def finish(self, state: str, reason: str | None = None, timeout_s: float = 60.0) -> str | None:
        """Sends the rest and ends the MLflow run. Returns None, or in one line why not everything has arrived."""
        self._reason = reason
        self._final = state
        self._wake.set()
        self._thread.join(LAST_CHANCE_S)
        if self._problem is None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return None
        self._gave_up = True
        self._wake.set()
        return self._problem or f"{self.uri}: has not taken everything within {timeout_s:g} s"

    def catch_up(self) -> str | None:
        """For a run that has ended: sends what the mirror of its own process could not. Returns as `finish` does."""
        status = self.folder.status()
        if self.position and self.position.state == status.state:
            return None
        self.start()
        return self.finish(status.state, status.reason)

    @property
    def position(self) -> Position | None:
        return position_of(self.folder, self.uri)

    @property
    def run_id(self) -> str | None:
        return self.position.run_id if self.position else None

    def _follow(self) -> None:
        pause_s = None
        while not self._gave_up:
            self._wake.wait(pause_s)
            self._wake.clear()
            final = self._final
            try:
                self._send(final)
            except Exception as error:  # whatever a server, a driver or a disk comes up with
                problem = one_line(self.uri, error)
                if self._problem is None:
                    log.warning("MLflow is behind, and will be caught up from the journal: %s", problem)
                self._session, self._problem = None, problem
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if pause_s else FIRST_PAUSE_S
            else:
                self._problem = pause_s = None
                if final:
                    return

    def _send(self, final: str | None) -> None:
        limit = math.inf if final in DONE else self._covered
        session = self._session = self._session or self._open()
        new, offset = read_rows(self.folder.journal_path, session.offset)
        rows = last_segments(session.uncovered + new)
        self._send_rows(session, [row for row in rows if row["step"] < limit])
        session.uncovered, session.offset = [row for row in rows if row["step"] >= limit], offset
        if final:
            self._end(session, final)

    def _open(self) -> Session:
        from mlflow.entities import Param

        client = connect(self.uri)
        before = self.position
        self._check_wanted()
        experiment_id = get_experiment(client, self.experiment)
        # by the id that is known; by tags where a kill came before the id was kept
        run = active_run(client, before.run_id) if before else None
        run = run or find_run(client, experiment_id, identity(self.folder)) or self._create(client, experiment_id)
        run_id = run.info.run_id
        session = Session(client, before if before and before.run_id == run_id else Position(self.uri, run_id))
        # those of an earlier start stay: MLflow refuses to change a param
        params = {allowed(key): str(value)[:TEXT_LENGTH] for key, value in self.params.items()}
        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        for batch in chunks(missing, PARAMS_PER_CALL):
            client.log_batch(run_id, params=batch)
        parent_id = self.folder.status().mlflow_parent_id
        if parent_id and PARENT not in run.data.tags and active_run(client, parent_id):
            client.set_tag(run_id, PARENT, parent_id)
        client.set_tag(run_id, "status", "running")
        client.update_run(run_id, status="RUNNING")
        self._keep(session, state="running")
        self.folder.update(mlflow_run_id=run_id)
        return session

    def _create(self, client: Any, experiment_id: str) -> Any:
        """A run that began when the folder was made."""
        tags = origin(self.folder.provenance()) | self.tags | identity(self.folder)
        return create_run(client, experiment_id, self.run_name, self.folder.status().started_s, tags)

    def _send_rows(self, session: Session, rows: list[Row]) -> None:
        """Of rows that stand for good, and of which some may have been sent; none of the spikes has been counted."""
        from mlflow.entities import Metric

        points = []
        for row in rows:
            session.spikes += "spike" in row
            if row["step"] >= session.position.next_step:
                point = int(row["time_s"] * 1000), row["step"]
                points += [Metric(name, value, *point) for name, value in metrics_of(row, session.spikes)]
        for batch in chunks(points, METRICS_PER_CALL):
            self._check_wanted()
            session.client.log_batch(session.position.run_id, metrics=batch)
            self._keep(session, next_step=batch[-1].step)  # the rest of this step may be in the next batch
        if points:
            self._keep(session, next_step=points[-1].step + 1)

    def _end(self, session: Session, state: str) -> None:
        run_id = session.position.run_id
        for path in self.folder.artifacts():
            inside = path.parent.relative_to(self.folder.path).as_posix()
            session.client.log_artifact(run_id, str(path), None if inside == "." else inside)
        session.client.set_tag(run_id, "status", state)
        if self._reason:
            session.client.set_tag(run_id, "reason", self._reason[:TEXT_LENGTH])
        ended_ms = int(self.folder.journal_path.stat().st_mtime * 1000)
        session.client.set_terminated(run_id, STATES[state], end_time=ended_ms)
        self._keep(session, state=state)

    def _check_wanted(self) -> None:
        """From when on `finish` has given up, this run's mirror is another process's."""
        if self._gave_up:
            raise TimeoutError("too slow for what was left at the end")

    def _keep(self, session: Session, **changes: Any) -> None:
        session.position = dataclasses.replace(session.position, **changes)
        replace_file(self.folder.path / "mirror.json", json.dumps(dataclasses.asdict(session.position)))


def mirror_of(config: Run, folder: RunFolder, label: str) -> Mirror | None:
    """A run in MLflow, under a name that says what varies, with its choices to filter by; None where nothing tracks.

    `label`: of the sweep that asks for the run.
    """
    if config.tracking.uri is None:
        return None
    facts = {key: str(getattr(config, key)) for key in TAGS if hasattr(config, key)}
    tags = folder.provenance()["choices"] | facts
    return Mirror(config.tracking.uri, folder, config.experiment, label, flatten(plain(config)), tags)


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
