"""The MLflow run of a run's folder: the store, the run in it, found or made, and how our names are spelt there."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from mxstudy.reader import require
from mxstudy.tracking.folder import RunFolder

SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
TEXT_LENGTH = 6000  # MLflow's limit for the value of a param
PARENT = "mlflow.parentRunId"

# A view of an experiment's list of runs, kept as MLflow keeps those that are shared: ?viewStateShareKey=mxstudy
VIEW = "mlflow.sharedViewState.mxstudy"
COLUMNS = [f"tags.`{tag}`" for tag in ("status", "precision", "norm", "seed")]
COLUMNS += [f"metrics.`{metric}`" for metric in ("val/loss", "train/loss", "train/spikes")]

# No telemetry, no INFO lines, no bars, and no retries inside a call: those are the mirror's business. An SQLite file
# that was read-only when it was opened stays so for that connection: each session has its own. Behind a busy server
# SQLite lets a call wait for 20 s; one that is given up sooner is obeyed all the same, and then made again.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}


def check_uri(uri: str) -> None:
    """Raises ConfigError for what MLflow, or a second process, could not open."""
    scheme = re.split(r"[+:]", uri)[0]
    require(scheme in SCHEMES, f"tracking.uri: {uri!r} is none of {', '.join(SCHEMES)}")
    in_memory = uri == "sqlite://" or ":memory:" in uri
    require(not in_memory, f"tracking.uri: {uri!r} ends with its process; give a file: sqlite:///mlflow.db")


def connect(uri: str) -> Any:
    """An MlflowClient; imported here, because it takes seconds and not every run needs it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    database = sqlite_file(uri)
    if database:  # MLflow would try for 100 s, in many lines, to open what is no database
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA schema_version")
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # the traceback of what it raises anyway
    return MlflowClient(uri)


def get_experiment(client: Any, name: str) -> str:
    """The id of the experiment of that name, which is made if there is none."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            place, view = artifact_location(client.tracking_uri, name), json.dumps({"selectedColumns": COLUMNS})
            return client.create_experiment(name, artifact_location=place, tags={VIEW: view})
        except MlflowException:  # another process has just made it; else the next line says what is wrong
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return experiment.experiment_id


def artifact_location(uri: str, experiment: str) -> str | None:
    """Beside an SQLite file, wherever the job runs; a server has a place of its own (None)."""
    database = sqlite_file(uri)
    return (database.parent / "mlruns" / experiment).as_uri() if database else None


def sqlite_file(uri: str) -> Path | None:
    prefix, path = uri[:10], uri[10:].partition("?")[0]
    return Path(path).absolute() if prefix == "sqlite:///" else None


def active_run(client: Any, run_id: str) -> Any | None:
    """The run of that id; None if this store has none, or it was deleted in MLflow."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def find_run(client: Any, experiment_id: str, tags: Mapping[str, str]) -> Any | None:
    """The first run with all of these tags; not what was deleted in MLflow."""
    query = " and ".join(f"tags.{key} = '{value}'" for key, value in tags.items())
    found = client.search_runs([experiment_id], query, max_results=1, order_by=["attributes.start_time ASC"])
    return found[0] if found else None


def create_run(client: Any, experiment_id: str, run_name: str, started_s: float, tags: Mapping[str, Any]) -> Any:
    """`tags`: lists and mappings are left out."""
    texts = {key: str(value)[:TEXT_LENGTH] for key, value in tags.items() if not isinstance(value, dict | list)}
    return client.create_run(experiment_id, start_time=int(started_s * 1000), tags=texts, run_name=run_name)


def origin(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run's code comes from, also in the words for which MLflow has columns of its own."""
    known = {"mlflow.source.name": provenance["command"], "mlflow.source.git.commit": provenance["commit"]}
    return dict(provenance) | known


def identity(folder: RunFolder) -> dict[str, str]:
    """With the time, because `rerun=true` trains the same fingerprint again in a new folder."""
    status = folder.status()
    return {"fingerprint": status.fingerprint, "started_s": str(status.started_s)}
