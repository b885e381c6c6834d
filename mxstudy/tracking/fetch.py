"""Runs as MLflow has them: their artifacts, which are their folders without the checkpoints, are fetched to be read."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mxstudy.reader import require
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_store import check_uri, connect

SCHEME = "mlflow:"
FILE = "sqlite:///"
DEFAULT_URI = f"{FILE}mlflow.db"
NEEDED = {"status.json", "config.yaml", "provenance.json"}


@functools.cache
def fetch(experiment: str) -> list[RunFolder]:
    """The runs of an experiment that have ended, in folders that live as long as this process.

    From the store that MLFLOW_TRACKING_URI names, as everywhere in MLflow; else from mlflow.db here. A run that goes on
    is not among them: it has no artifacts yet. Raises ConfigError where there is no such experiment.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_URI)
    check_uri(uri)
    file = Path(uri.removeprefix(FILE))
    require(  # MLflow would make an empty one
        not uri.startswith(FILE) or file.exists(),
        f"{SCHEME}{experiment}: there is no {file} here; MLFLOW_TRACKING_URI names another store",
    )
    client = connect(uri)
    known = {known.name: known.experiment_id for known in client.search_experiments()}
    require(
        experiment in known,
        f"{SCHEME}{experiment}: {uri} has no such experiment; it has {', '.join(sorted(known))}; "
        "MLFLOW_TRACKING_URI names another store",
    )
    to = Path(tempfile.mkdtemp(prefix="mxstudy-mlflow-"))
    atexit.register(shutil.rmtree, to, ignore_errors=True)
    found, page = [], None
    while page is None or page.token:
        page = client.search_runs([known[experiment]], order_by=["start_time ASC"], page_token=page and page.token)
        found += [run for run in page if {file.path for file in client.list_artifacts(run.info.run_id)} >= NEEDED]
    return [fetch_run(client, run, to) for run in found]


def fetch_run(client: Any, run: Any, to: Path) -> RunFolder:
    folder = RunFolder(to / run.info.run_id)
    folder.path.mkdir()
    client.download_artifacts(run.info.run_id, "", str(folder.path))
    # its own file was sent before the last word was written into it
    folder.update(state=run.data.tags["status"], mlflow_run_id=run.info.run_id)
    return folder
