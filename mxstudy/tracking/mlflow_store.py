"""A store of MLflow: opened, its experiments, and the runs in it, found or made by what their folders say.

Nothing here knows the journal; `mlflow_mirror` sends it, and `mlflow_parent` makes runs of whole sweeps.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from mxstudy.compat.mlflow import SOURCE_COMMIT, SOURCE_NAME, quiet_client, shared_view
from mxstudy.reader import require
from mxstudy.tracking.folder import RunFolder

SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
TEXT_LENGTH = 6000  # MLflow's limit for the value of a param

VIEW = "mxstudy"  # the name of our view of an experiment's list of runs
COLUMNS = [f"tags.`{tag}`" for tag in ("status", "precision", "norm", "seed")]
COLUMNS += [f"metrics.`{metric}`" for metric in ("val/loss", "train/loss", "train/spikes")]


def check_uri(uri: str) -> None:
    """Raise ConfigError for what MLflow, or a second process, could not open."""
    scheme = re.split(r"[+:]", uri)[0]
    require(scheme in SCHEMES, f"tracking.uri: {uri!r} is none of {', '.join(SCHEMES)}")
    in_memory = uri == "sqlite://" or ":memory:" in uri
    require(not in_memory, f"tracking.uri: {uri!r} ends with its process; give a file: sqlite:///mlflow.db")


def connect(uri: str) -> Any:
    """Return an MlflowClient of that store; to import MLflow takes seconds, and not every run needs it."""
    database = sqlite_file(uri)
    if database:  # MLflow would try for 100 s, in many lines, to open what is no database
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA schema_version")
    return quiet_client(uri)


def create_store(uri: str) -> str | None:
    """Open a store once, before jobs do: eight processes at once break an SQLite database that is not there yet.

    Returns None, or in one line why it cannot be used now. Raises ConfigError as check_uri.
    """
    check_uri(uri)
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:
        return one_line(uri, error)
    return None


def one_line(uri: str, error: BaseException) -> str:
    """Return what is at the bottom of an error: 'Connection refused', not the four layers above."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{uri}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def get_experiment(client: Any, name: str) -> str:
    """Return the id of the experiment of that name, which is made if there is none."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            place = artifact_location(client.tracking_uri, name)
            return client.create_experiment(name, artifact_location=place, tags=shared_view(VIEW, COLUMNS))
        except MlflowException:  # another process has just made it; else the next line says what is wrong
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return experiment.experiment_id


def artifact_location(uri: str, experiment: str) -> str | None:
    """Return the place beside an SQLite file, wherever the job runs; a server has a place of its own (None)."""
    database = sqlite_file(uri)
    return (database.parent / "mlruns" / experiment).as_uri() if database else None


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite store, None for any other."""
    prefix, path = uri[:10], uri[10:].partition("?")[0]
    return Path(path).absolute() if prefix == "sqlite:///" else None


def active_run(client: Any, run_id: str) -> Any | None:
    """Return the run of that id; None if this store has none, or it was deleted in MLflow."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def find_run(client: Any, experiment_id: str, tags: Mapping[str, str]) -> Any | None:
    """Return the first run with all of these tags; not what was deleted in MLflow."""
    query = " and ".join(f"tags.{key} = '{value}'" for key, value in tags.items())
    found = client.search_runs([experiment_id], query, max_results=1, order_by=["attributes.start_time ASC"])
    return found[0] if found else None


def create_run(client: Any, experiment_id: str, run_name: str, started_s: float, tags: Mapping[str, Any]) -> Any:
    """Return a new run; of its `tags` lists and mappings are left out."""
    texts = {key: str(value)[:TEXT_LENGTH] for key, value in tags.items() if not isinstance(value, dict | list)}
    return client.create_run(experiment_id, start_time=int(started_s * 1000), tags=texts, run_name=run_name)


def origin(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return tags that say where a run's code comes from, also in the words for which MLflow has columns of its own."""
    known = {SOURCE_NAME: provenance["command"], SOURCE_COMMIT: provenance["commit"]}
    return dict(provenance) | known


def identity(folder: RunFolder) -> dict[str, str]:
    """Return the tags that tell a folder's run from all others.

    The time is one of them, because `rerun=true` trains the same fingerprint again in a new folder.
    """
    status = folder.status()
    return {"fingerprint": status.fingerprint, "started_s": str(status.started_s)}
