"""Fetch runs from MLflow: their artifacts are their run folders without the checkpoints."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxstudy.reader import ConfigError, require
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import runs_of
from mxstudy.tracking.mlflow_store import check_uri, connect, member_of, one_line

SCHEME = "mlflow:"
WHERE = "MLFLOW_TRACKING_URI"
OTHERWISE = f"set {WHERE} to use another store"
FILE = "sqlite:///"
DEFAULT_URI = f"{FILE}mlflow.db"
NEEDED = {"status.json", "config.yaml", "provenance.json"}


def fetch(name: str) -> list[RunFolder]:
    """Return the ended runs of an experiment or sweep, in temporary folders that are deleted when this process exits.

    If a run was trained again, the last version that has ended is returned.

    The store is the one that MLFLOW_TRACKING_URI names, as everywhere in MLflow, or else mlflow.db in the current
    folder. A run that still trains has no artifacts yet and is left out. Raises ConfigError for an unknown name, and
    for a store that cannot be read.
    """
    uri = os.environ.get(WHERE, DEFAULT_URI)
    check_uri(uri, WHERE)
    file = Path(uri.removeprefix(FILE))
    # MLflow would create an empty one
    require(not uri.startswith(FILE) or file.exists(), f"{SCHEME}{name}: there is no {file} here; {OTHERWISE}")
    try:
        return fetch_from(uri, name)
    except ConfigError:
        raise
    except Exception as error:  # from MLflow or anything below it
        raise ConfigError(f"{SCHEME}{name}: {one_line(uri, error)}; start that server again, or {OTHERWISE}") from error


def fetch_from(uri: str, name: str) -> list[RunFolder]:
    client = connect(uri)
    ids = {found.name: found.experiment_id for found in client.search_experiments()}
    searches = [([ids[name]], "")] if name in ids else []
    found: dict[str, Any] = {}
    for experiments, search in [*searches, ([*ids.values()], member_of(name))] if ids else []:
        for run in all_runs(client, experiments, search):
            if {file.path for file in client.list_artifacts(run.info.run_id)} >= NEEDED:
                found[run.data.tags.get("fingerprint", run.info.run_id)] = run
    known = ", ".join(sorted(ids))
    require(
        bool(found) or name in ids,
        f"{SCHEME}{name}: {uri} has no such experiment or sweep; it has {known}; {OTHERWISE}",
    )
    to = Path(tempfile.mkdtemp(prefix="mxstudy-mlflow-"))
    atexit.register(shutil.rmtree, to, ignore_errors=True)
    folders = [fetch_run(client, run, to) for run in found.values()]
    return runs_of(folders, name) or folders


def all_runs(client: Any, experiment_ids: list[str], search: str) -> Iterator[Any]:
    """Yield all runs that a search finds, in the order in which they were started."""
    page = None
    while page is None or page.token:
        page = client.search_runs(experiment_ids, search, order_by=["start_time ASC"], page_token=page and page.token)
        yield from page


def fetch_run(client: Any, run: Any, to: Path) -> RunFolder:
    folder = RunFolder(to / run.info.run_id)
    folder.path.mkdir()
    client.download_artifacts(run.info.run_id, "", str(folder.path))
    # the folder's own status.json was sent before the final state was written to it
    folder.update(state=run.data.tags["status"], mlflow_run_id=run.info.run_id)
    return folder
