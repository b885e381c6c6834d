"""Create the parents of a launch's sweeps in MLflow in a thread, so that no job waits for a slow or silent server."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mxstudy.compat.mlflow import quiet_mlflow
from mxstudy.launch.job import Job
from mxstudy.launch.say import say
from mxstudy.launch.sweep import REPAIR, sweeps
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_store import create_store, one_line


class Parents:
    """A launch's tracking stores and its sweeps' parent runs, until all of them exist.

    If a store cannot be reached, a line says so, and the jobs run with their journals only.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)
        self._uris = sorted({uri for job in jobs if (uri := job.config.tracking.uri) is not None})
        self._ids: dict[str, str] = {}  # of the parent, by the fingerprint of each of its jobs
        self._claimed: list[Job] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._make, name="parents", daemon=True)
        if self._uris:
            quiet_mlflow()  # here, because two threads, this one and a mirror's, cannot import it at the same time
        self._thread.start()

    def tell(self, job: Job) -> None:
        """Record a job's parent in the job's new folder, now or as soon as the parent exists."""
        with self._lock:
            self._claimed.append(job)
            self._record(job)

    def wait(self) -> None:
        """Wait until all parents exist, or until a line has been printed that says why they do not."""
        self._thread.join()

    def _make(self) -> None:
        away = {uri: reason for uri in self._uris if (reason := create_store(uri))}
        for reason in away.values():
            say(f"tracking: {reason}; the runs continue with their journals only")
        for sweep in sweeps(self._jobs):
            if sweep.uri not in away:
                try:
                    parent_id = sweep.begin()
                    with self._lock:
                        self._ids |= dict.fromkeys(sweep.folders, parent_id)
                        for job in self._claimed:
                            self._record(job)
                except Exception as error:  # a server, a driver or a disk may raise anything
                    say(f"tracking: {one_line(sweep.uri, error)}; {REPAIR}")

    def _record(self, job: Job) -> None:
        if parent_id := self._ids.get(job.fingerprint):
            RunFolder(job.folder).update(mlflow_parent_id=parent_id)
