"""The mirror: a thread that sends the journal to MLflow, in batches. The journal is the truth, and loses nothing.

Sent is what a durable checkpoint covers, and everything once a run is done: a step that was sent is never superseded.
What a server does not take is offered again, after pauses that grow; a run does not wait for it before its end, and
then at most a minute.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from typing import Any

from mxstudy.config import Run
from mxstudy.reader import flatten, plain
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Row
from mxstudy.tracking.mlflow_run import (
    active_run,
    check_uri,
    connect,
    create_run,
    find_run,
    get_experiment,
    identity,
    origin,
)
from mxstudy.tracking.session import GONE, METRICS_PER_CALL, Position, Session, chunks, points_of, position_of

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # between attempts while the server is away
LAST_CHANCE_S = 30.0  # what a run waits at its end for a server that is away: longer than one takes to start again

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
    position = position_of(folder, uri)
    if position is None:
        return None
    try:
        client = connect(uri)
        for batch in chunks([point for row in rows for point in points_of(row)], METRICS_PER_CALL):
            client.log_batch(position.run_id, metrics=batch)
    except Exception as error:  # whatever a server or a driver comes up with
        return one_line(uri, error)
    return None


def one_line(uri: str, error: BaseException) -> str:
    """What is at the bottom of it: 'Connection refused', not the four layers above."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{uri}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
        self._problem: str | None = None  # of the last call; None if it succeeded
        self._failing_since_s = 0.0
        self._calling = False
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
        ended_s = time.monotonic()
        while self._thread.is_alive() and not self._is_hopeless(ended_s, timeout_s):
            self._thread.join(0.1)
        if not self._thread.is_alive():
            return None
        self._gave_up = True
        self._wake.set()
        return self._problem or f"{self.uri}: has not taken everything within {timeout_s:g} s"

    def _is_hopeless(self, ended_s: float, timeout_s: float) -> bool:
        """Too late for anything; or the server is away: not busy with a call, nor has it obeyed one for long."""
        now_s = time.monotonic()
        away_s = now_s - max(ended_s, self._failing_since_s) if self._problem and not self._calling else 0.0
        return now_s - ended_s > timeout_s or away_s > LAST_CHANCE_S

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

    def _follow(self) -> None:
        pause_s = None  # until there is something to do
        while not self._gave_up:
            self._wake.wait(pause_s)
            self._wake.clear()
            final = self._final
            self._calling = True
            try:
                complete = self._send(final)
            except Exception as error:  # whatever a server, a driver or a disk comes up with
                self._failed(error)
                longer_s = FIRST_PAUSE_S if final or not pause_s else min(2 * pause_s, LONGEST_PAUSE_S)
                pause_s = random.uniform(0.75, 1.25) * longer_s  # not all runs at once
            else:
                self._problem = None
                if final and complete:
                    return
                pause_s = None if complete else 0.0
            self._calling = False

    def _failed(self, error: Exception) -> None:
        problem = one_line(self.uri, error)
        if self._problem is None:
            log.warning("MLflow is behind, and will be caught up from the journal: %s", problem)
            self._failing_since_s = time.monotonic()
        self._problem = problem
        if getattr(error, "error_code", None) in GONE:
            self._session = None  # had again from mirror.json and the journal

    def _send(self, final: str | None) -> bool:
        """Makes the next call, or few; returns whether nothing is left."""
        session = self._session = self._session or self._open()
        complete = session.send(math.inf if final in DONE else self._covered)
        if final and complete:
            session.end(final, self._reason)
        return complete

    def _open(self) -> Session:
        client = connect(self.uri)
        before = self.position
        self._check_wanted()
        experiment_id = get_experiment(client, self.experiment)
        # by the id that is known; by tags where a kill came before the id was kept
        run = active_run(client, before.run_id) if before else None
        run = run or find_run(client, experiment_id, identity(self.folder)) or self._create(client, experiment_id)
        run_id = run.info.run_id
        position = before if before and before.run_id == run_id else Position(self.uri, run_id)
        session = Session(client, self.folder, position)
        session.begin(run.data.params, run.data.tags, self.params)
        return session

    def _create(self, client: Any, experiment_id: str) -> Any:
        """A run that began when the folder was made."""
        tags = origin(self.folder.provenance()) | self.tags | identity(self.folder)
        return create_run(client, experiment_id, self.run_name, self.folder.status().started_s, tags)

    def _check_wanted(self) -> None:
        """From when on `finish` has given up, this run's mirror is another process's."""
        if self._gave_up:
            raise TimeoutError("too slow for what was left at the end")


def mirror_of(config: Run, folder: RunFolder, label: str) -> Mirror | None:
    """A run in MLflow, under a name that says what varies, with its choices to filter by; None where nothing tracks.

    `label`: of the sweep that asks for the run.
    """
    if config.tracking.uri is None:
        return None
    facts = {key: str(getattr(config, key)) for key in TAGS if hasattr(config, key)}
    tags = folder.provenance()["choices"] | facts
    return Mirror(config.tracking.uri, folder, config.experiment, label, flatten(plain(config)), tags)
