"""MLflow: a quiet client, and what its pages read from tags and addresses. Checked with mlflow 3.17.2."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

# Tags that MLflow's pages know: a run's parent; Markdown on its page; columns of a table of runs.
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
SOURCE_NAME = "mlflow.source.name"
SOURCE_COMMIT = "mlflow.source.git.commit"

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
LOUD = {"mlflow": logging.WARNING, "alembic": logging.WARNING}
LOUD["mlflow.store.db.utils"] = logging.CRITICAL  # the traceback of what it raises anyway


def quiet_client(uri: str) -> Any:
    """Return an MlflowClient that says nothing and tries every call once.

    Why: what it prints, and how often it tries, is set by variables that it reads as it is imported, and by its
    loggers. It is imported here, because that takes seconds and not every run needs it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name, level in LOUD.items():
        logging.getLogger(name).setLevel(level)
    return MlflowClient(uri)


def shared_view(name: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the tag of an experiment that keeps a view of its runs, which ?viewStateShareKey=NAME shows.

    Why: MLflow keeps the views that are shared like this, and has no other way to choose a list's columns.
    """
    return {f"mlflow.sharedViewState.{name}": json.dumps({"selectedColumns": list(columns)})}


def charts_of_children(experiment_id: str, parent_id: str, order_by: str) -> str:
    """Return the address of the page that draws the metrics of a run's children into the same charts.

    `order_by`: a column; sorted by time, they would be folded away. Why: the address is that of MLflow's page, and not
    part of any interface.
    """
    query = {
        "workflowType": "machine_learning",
        "compareRunsMode": "CHART",
        "searchFilter": f"tags.{PARENT}='{parent_id}'",
        "orderByKey": order_by,
        "orderByAsc": "true",
    }
    return f"#/experiments/{experiment_id}/runs?{urlencode(query)}"
