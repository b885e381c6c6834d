"""The mirror: a thread that sends the journal to MLflow in batches. The journal is the authoritative record.

The mirror sends the steps that a durable checkpoint covers, and everything once a run is done, so that a step that was
sent is never superseded. If the server fails, the mirror tries again after growing pauses. The run waits for it only at
its end, at most a minute, and not at all for a server that is known to be silent.

Metric points carry the journal's own timestamps, and MLflow stores a point once even if it is sent twice. So
`mirror.json` (which MLflow run, up to which step) may lag behind the server, and a kill duplicates nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxstudy.compat.mlflow import COLOR, PARENT
from mxstudy.config import Run
from mxstudy.reader import flatten, plain
from mxstudy.small_files import read_if_there
from mxstudy.tracking import memberships
from mxstudy.tracking.folder import DONE, RunFolder, RunLocked
from mxstudy.tracking.journal import Row, last_segments, read_rows
from mxstudy.tracking.mlflow_metrics import allowed, metrics_of
from mxstudy.tracking.mlflow_store import (
    TEXT_LENGTH,
    active_run,
    arm_tag,
    connect,
    create_run,
    find_run,
    get_experiment,
    membership_tags,
    one_line,
    origin,
    own_tags,
)
from mxstudy.tracking.silence import answers_of
from mxstudy.whole_files import replace_file

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # between attempts while the server is away
LAST_CHANCE_S = 30.0  # how long a run waits at its end for an absent server: longer than a restart takes

TAGS = ("experiment", "study", "seed", "data_seed")  # config keys that become tags, beside the choices

METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # MLflow's limits

# The final state of a run -> MLflow's status.
STATES = {
    "finished": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
    "cancelled": "KILLED",
}
GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the run does not exist; the run was deleted


class Mirror:
    """The mirror of a run: the training thread tells it which steps are covered, and waits for it only in `finish`."""

    def __init__(
        self,
        uri: str,
        folder: RunFolder,
        experiment: str,
        run_name: str,
        params: dict[str, Any],
        tags: dict[str, str],
    ) -> None:
        """Prepare the mirror. `params` is the flattened config, and `tags` are added to the tags of the provenance."""
        self.uri, self.folder, self.experiment, self.run_name = uri, folder, experiment, run_name
        self.params, self.tags = params, tags
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._wake = threading.Event()
        self._session: Session | None = None
        self._answers = answers_of(uri)
        self._covered = 0
        self._final: str | None = None
        self._reason: str | None = None
        self._problem: str | None = None  # of the last call; None if it succeeded
        self._failing_since_s = 0.0
        self._calling = False
        self._gave_up = False

    def start(self) -> None:
        self._wake.set()
        self._thread.start()

    def covered(self, step: int) -> None:
        """Announce a durable checkpoint at `step`: rows of earlier steps may now be sent."""
        self._covered = step
        self._wake.set()

    def finish(self, state: str, reason: str | None = None, timeout_s: float = 60.0) -> str | None:
        """Send the rest and end the MLflow run. Return None, or one line that says why not everything has arrived.

        `catch_up` sends the rest when the same command runs again, or from a launcher that waits for its jobs.
        """
        self._reason = reason
        self._final = state
        self._wake.set()
        ended_s = time.monotonic()
        while self._thread.is_alive() and not self._is_hopeless(ended_s, timeout_s):
            self._thread.join(0.1)
        if not self._thread.is_alive():
            return None
        self._gave_up = True
        self._wake.set()
        why = "does not answer" if self._answers.is_silent else f"did not accept everything within {timeout_s:g} s"
        return self._problem or f"{self.uri}: {why}"

    def _is_hopeless(self, ended_s: float, timeout_s: float) -> bool:
        """Return whether `timeout_s` has passed, or the server is silent or absent.

        The server counts as absent if no call is running and all calls have failed for LAST_CHANCE_S.
        """
        now_s = time.monotonic()
        away_s = now_s - max(ended_s, self._failing_since_s) if self._problem and not self._calling else 0.0
        return now_s - ended_s > timeout_s or away_s > LAST_CHANCE_S or self._answers.is_silent

    def catch_up(self, wait_s: float = 90.0) -> str | None:
        """Send what the run's own process could not send before it ended. Returns the same as `finish`.

        First waits until no other process writes to the run: two at once would each create an MLflow run.
        """
        if not self._is_complete():
            try:
                with self.folder.lock(wait_s):
                    if not self._is_complete():
                        self.start()
                        status = self.folder.status()
                        return self.finish(status.state, status.reason)
            except (RunLocked, OSError) as error:  # it is still locked, or this user may not write there
                return str(error)
        return tell_memberships(self.uri, self.folder)

    def _is_complete(self) -> bool:
        position = self.position
        return position is not None and position.state == self.folder.status().state

    @property
    def position(self) -> Position | None:
        return position_of(self.folder, self.uri)

    def _follow(self) -> None:
        pause_s = None  # until there is something to do
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._gave_up:
                return
            final = self._final
            self._calling = True
            try:
                with self._answers.asking():
                    complete = self._send(final)
            except Exception as error:  # a server, a driver or a disk may raise anything
                self._failed(error)
                longer_s = FIRST_PAUSE_S if final or not pause_s else min(2 * pause_s, LONGEST_PAUSE_S)
                pause_s = random.uniform(0.75, 1.25) * longer_s  # so that the runs of a sweep do not all call at once
            else:
                self._problem = None
                if final and complete:
                    return
                pause_s = None if complete else 0.0
            self._calling = False

    def _failed(self, error: Exception) -> None:
        problem = one_line(self.uri, error)
        if self._problem is None:
            log.warning("MLflow is behind, and will catch up from the journal: %s", problem)
            self._failing_since_s = time.monotonic()
        self._problem = problem
        if getattr(error, "error_code", None) in GONE:
            self._session = None  # it is opened again from mirror.json and the journal

    def _send(self, final: str | None) -> bool:
        """Make the next few calls, and return whether nothing is left to send."""
        session = self._session = self._session or self._open()
        complete = session.send(math.inf if final in DONE else self._covered)
        if final and complete:
            session.end(final, self._reason)
        return complete

    def _open(self) -> Session:
        client = connect(self.uri)
        before = self.position
        if self._gave_up:  # from then on another process may mirror this run
            raise TimeoutError("the run ended before everything was sent")
        experiment_id = get_experiment(client, self.experiment, self.tags["study"])
        # by the recorded id, or by tags if a kill came before the id was recorded
        run = active_run(client, before.run_id) if before else None
        run = run or find_run(client, experiment_id, own_tags(self.folder)) or self._create(client, experiment_id)
        run_id = run.info.run_id
        position = before if before and before.run_id == run_id else Position(self.uri, run_id)
        session = Session(client, self.folder, position)
        session.begin(run.data.params, run.data.tags, self.params)
        return session

    def _create(self, client: Any, experiment_id: str) -> Any:
        """Create an MLflow run that starts when the folder was created, and return it."""
        tags = origin(self.folder.provenance()) | self.tags | own_tags(self.folder) | membership_tags(self.folder)
        return create_run(client, experiment_id, self.run_name, self.folder.status().started_s, tags)


def mirror_of(config: Run, folder: RunFolder, label: str) -> Mirror | None:
    """Return the mirror of a run, or None if `tracking.uri` is not set.

    In MLflow it has the name and the colour of its arm in the sweep that started it, or of `label` and no colour if it
    is older than arms. Its choices become tags to filter by.
    """
    if config.tracking.uri is None:
        return None
    about, values = folder.provenance(), plain(config)
    facts = {key: str(values[key]) for key in TAGS if key in values}
    tags = about["choices"] | facts | ({COLOR: about["color"]} if "color" in about else {})
    name = about.get("name", label)
    return Mirror(config.tracking.uri, folder, config.mlflow_experiment, name, flatten(values), tags)


def add_rows(uri: str, folder: RunFolder, rows: list[Row]) -> str | None:
    """Send rows that were measured after a run's end to the folder's MLflow run in this store, if there is one.

    Rows that are sent twice are stored once. Returns None, or one line that says why they were not stored.
    """
    return tell(uri, folder, lambda session: session.add(rows))


def tell_memberships(uri: str, folder: RunFolder) -> str | None:
    """Name the experiments and sweeps of a run that has ended in its MLflow run in this store, if there are several.

    Returns None, or one line that says why that failed.
    """
    return tell(uri, folder, Session.tell_memberships) if (folder.path / memberships.NAME).exists() else None


def tell(uri: str, folder: RunFolder, what: Callable[[Session], None]) -> str | None:
    """Call `what` for the folder's MLflow run in this store, if there is one. Returns None, or why that failed."""
    position = position_of(folder, uri)
    if position is None:
        return None
    try:
        answers_of(uri).check()
        what(Session(connect(uri), folder, position))
    except Exception as error:  # a server or a driver may raise anything
        return one_line(uri, error)
    return None


@dataclass(frozen=True)
class Position:
    """mirror.json: the MLflow run has all rows of steps below `next_step`; `state` is the last one sent to MLflow."""

    uri: str
    run_id: str
    next_step: int = 0
    state: str = "running"


def position_of(folder: RunFolder, uri: str) -> Position | None:
    """Return how much of the run that store has, or None if it has no such run."""
    remedy = "delete it; the same command, run again, sends everything again"
    position: Position | None = read_if_there(Position, folder.path / "mirror.json", remedy)
    return position if position and position.uri == uri else None


class Session:
    """An open MLflow run, to which the journal is sent in calls that may fail and be repeated.

    Rows are read from the journal once; their points wait here until a call with them has succeeded.
    """

    def __init__(self, client: Any, folder: RunFolder, position: Position) -> None:
        self.client, self.folder, self.position = client, folder, position
        self.has_parent = False
        self.offset, self.uncovered, self.spikes = 0, list[Row](), 0
        self.points: list[Any] = []
        self.texts: list[Row] = []

    def begin(self, known: Mapping[str, str], tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Set params, tags and status of the running run. `known`, `tags`: params and tags that MLflow has already."""
        from mlflow.entities import Param

        run_id = self.position.run_id
        # params of an earlier start stay as they are: MLflow refuses to change a param
        texts = {allowed(key): str(value)[:TEXT_LENGTH] for key, value in params.items()}
        missing = [Param(key, value) for key, value in texts.items() if key not in known]
        for batch in chunks(missing, PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=batch)
        self.has_parent = PARENT in tags
        if (backend := self.folder.backend()) and tags.get("backend") != backend:  # it was resumed on another backend
            self.client.set_tag(run_id, "backend", backend)
        self.client.set_tag(run_id, "status", "running")
        self.client.update_run(run_id, status="RUNNING")
        self.keep(state="running")
        self.folder.update(mlflow_run_id=run_id)

    def send(self, limit: float) -> bool:
        """Send one batch of points of steps below `limit`, and return whether nothing is left.

        The caller guarantees that these steps are never superseded.
        """
        self.tell_parent()
        read = not self.points  # waiting points go first; otherwise an outage would fill the memory
        if read:
            self._read(limit)
        while self.texts:  # before the points, which mark how far MLflow has the journal
            self.client.log_text(self.position.run_id, *text_of(self.texts[0]))
            del self.texts[0]
        batch = self.points[:METRICS_PER_CALL]
        if batch:
            self.client.log_batch(self.position.run_id, metrics=batch)
            del self.points[: len(batch)]
            cut = bool(self.points) and self.points[0].step == batch[-1].step  # the rest of a step is in the next batch
            self.keep(next_step=batch[-1].step + (not cut))
        return read and not self.points

    def tell_parent(self) -> None:
        """Make the run a child of its sweep's parent run, which may have been made after it."""
        parent_id = None if self.has_parent else self.folder.status().mlflow_parent_id
        if parent_id and active_run(self.client, parent_id):  # None if it is in another store
            self.client.set_tag(self.position.run_id, PARENT, parent_id)
            if arm := self.folder.provenance().get("arm"):
                self.client.set_tag(self.position.run_id, arm_tag(parent_id), arm)
        self.has_parent = self.has_parent or parent_id is not None

    def end(self, state: str, reason: str | None) -> None:
        """Send the folder's files and the run's final state."""
        run_id = self.position.run_id
        for path in self.folder.artifacts():
            inside = path.parent.relative_to(self.folder.path).as_posix()
            self.client.log_artifact(run_id, str(path), None if inside == "." else inside)
        self.set_tags(membership_tags(self.folder))  # sweeps may have asked for the run since it began
        self.set_tags({"status": state} | ({"reason": reason[:TEXT_LENGTH]} if reason else {}))
        ended_ms = int(self.folder.journal_path.stat().st_mtime * 1000)
        self.client.set_terminated(run_id, STATES[state], end_time=ended_ms)
        self.keep(state=state)

    def add(self, rows: list[Row]) -> None:
        """Send rows that were measured after the run's end; the position stays."""
        for batch in chunks([point for row in rows for point in points_of(row)], METRICS_PER_CALL):
            self.client.log_batch(self.position.run_id, metrics=batch)

    def tell_memberships(self) -> None:
        """Name the experiments and sweeps of the run, and send the file that lists them."""
        self.set_tags(membership_tags(self.folder))
        self.client.log_artifact(self.position.run_id, str(self.folder.path / memberships.NAME))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_tag(self.position.run_id, key, value)

    def keep(self, **changes: Any) -> None:
        """Update the position and write it to mirror.json."""
        self.position = dataclasses.replace(self.position, **changes)
        replace_file(self.folder.path / "mirror.json", json.dumps(dataclasses.asdict(self.position)))

    def _read(self, limit: float) -> None:
        """Read the points of rows of steps below `limit` that were not sent yet; count the spikes of all rows."""
        new, self.offset = read_rows(self.folder.journal_path, self.offset)
        rows = last_segments(self.uncovered + new)
        self.uncovered = [row for row in rows if row["step"] >= limit]
        for row in rows:
            if row["step"] < limit:
                self.spikes += "spike" in row
                if row["step"] >= self.position.next_step:
                    self.points += points_of(row, self.spikes)
                    self.texts += [row] if "texts" in row else []


def points_of(row: Row, spikes: int = 0) -> list[Any]:
    """Return a row as MLflow's metrics, with the row's own time."""
    from mlflow.entities import Metric

    return [Metric(name, value, int(row["time_s"] * 1000), row["step"]) for name, value in metrics_of(row, spikes)]


def text_of(row: Row) -> tuple[str, str]:
    """Return what a model wrote at a step, below the prompts, and the name of the file that has it in MLflow."""
    return "\n\n---\n\n".join(one["prompt"] + one["text"] for one in row["texts"]), f"texts/step_{row['step']:08d}.txt"


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Return the items in lists of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
