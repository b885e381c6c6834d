"""MLflow: a quiet client, and the tags and addresses that its pages read. Checked with mlflow 3.17.2."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

# Tags that MLflow's pages read: a run's parent, its colour in charts, Markdown on its page, columns of a table of runs.
PARENT = "mlflow.parentRunId"
COLOR = "mlflow.runColor"
NOTE = "mlflow.note.content"
SOURCE_NAME = "mlflow.source.name"
SOURCE_COMMIT = "mlflow.source.git.commit"

# No telemetry, no INFO lines, no progress bars, and no retries inside a call, because the mirror retries. NullPool: a
# connection to an SQLite file that was read-only when it was opened stays read-only, so each session opens its own.
# Timeout: on a busy server SQLite makes a call wait for up to 20 s; a call that is given up sooner still takes effect,
# and is then repeated. A silent server makes every call wait for all of it.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
LOG_LEVELS = {"mlflow": logging.WARNING, "alembic": logging.WARNING}
LOG_LEVELS["mlflow.store.db.utils"] = logging.CRITICAL  # it logs the traceback of an exception that it also raises


def quiet_client(uri: str) -> Any:
    """Return an MlflowClient that prints nothing and tries every call once."""
    return quiet_mlflow().MlflowClient(uri)


def quiet_mlflow() -> Any:
    """Import MLflow and return it.

    Why: what it prints and how often it tries are set by environment variables that it reads when it is imported, and
    by its loggers. It is imported inside, because that takes seconds and not every run needs it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    for name, level in LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    return mlflow


def charts_over(experiment_ids: Sequence[str], search: str, order_by: str) -> str:
    """Return the address of the page that draws the runs that a search finds in several experiments.

    `order_by`: the column to sort by; sorted by time, children would be folded away. Why: the address is that of
    MLflow's page, and not part of any interface. That page shows no view of `mlflow_views`.
    """
    query = {
        "experiments": json.dumps(experiment_ids),
        "workflowType": "machine_learning",
        "compareRunsMode": "CHART",
        "searchFilter": search,
        "orderByKey": order_by,
        "orderByAsc": "true",
    }
    return f"#/compare-experiments/s?{urlencode(query)}"


def page_of(experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page. Why: see `charts_over`."""
    return f"#/experiments/{experiment_id}/runs/{run_id}"
