"""MLflow reads the variables, loggers, tags and addresses of mxstudy.compat.mlflow."""

from __future__ import annotations

import importlib
import inspect
import logging
import os

import pytest
from mlflow_pages import pages

from mxstudy.compat import mlflow as compat

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", [name for name in compat.ENVIRONMENT if name != "DO_NOT_TRACK"])
def test_mlflow_knows_the_variable(name: str) -> None:
    variables = importlib.import_module("mlflow.environment_variables")
    assert getattr(variables, name).name == name


def test_mlflow_asks_whether_it_may_track() -> None:
    telemetry = importlib.import_module("mlflow.telemetry.utils")
    assert '"DO_NOT_TRACK"' in inspect.getsource(telemetry)


def test_sqlite_can_be_had_without_a_pool() -> None:
    utils = importlib.import_module("mlflow.store.db.utils")
    assert "MLFLOW_SQLALCHEMYSTORE_POOLCLASS" in inspect.getsource(utils)
    assert hasattr(importlib.import_module("sqlalchemy.pool"), compat.ENVIRONMENT["MLFLOW_SQLALCHEMYSTORE_POOLCLASS"])


def test_the_loggers_have_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in compat.ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    compat.quiet_client("http://127.0.0.1:9")
    utils = importlib.import_module("mlflow.store.db.utils")
    assert utils._logger.name in compat.LOG_LEVELS
    assert {name: logging.getLogger(name).level for name in compat.LOG_LEVELS} == compat.LOG_LEVELS


def test_the_tags_are_mlflows() -> None:
    tags = importlib.import_module("mlflow.utils.mlflow_tags")
    assert compat.PARENT == tags.MLFLOW_PARENT_RUN_ID
    assert compat.NOTE == tags.MLFLOW_RUN_NOTE
    assert compat.SOURCE_NAME == tags.MLFLOW_SOURCE_NAME
    assert compat.SOURCE_COMMIT == tags.MLFLOW_GIT_COMMIT


def test_the_pages_read_the_colour_of_a_run() -> None:
    assert compat.COLOR in pages()


@pytest.mark.parametrize("word", ["compareRunsMode", "searchFilter", "orderByKey", "orderByAsc", "workflowType"])
def test_the_pages_read_the_address_of_charts_of_several_experiments(word: str) -> None:
    assert word in pages()
    assert "/compare-experiments/:searchString" in pages()
    address = compat.charts_over(["1", "2"], "tags.x = 'y'", "metrics.`val/loss`")
    assert f"{word}=" in address
    assert address.startswith("#/compare-experiments/s?experiments=%5B%221%22%2C+%222%22%5D&")
