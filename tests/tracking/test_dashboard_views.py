"""Our views of an experiment in MLflow show what they should, and it gets them when it should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mxstudy.compat.mlflow import NOTE
from mxstudy.tracking.dashboard import FOLDED, list_of_runs, runs_by_arm
from mxstudy.tracking.mlflow_metrics import PROBES
from mxstudy.tracking.mlflow_store import connect, get_experiment

TAG_LENGTH = 5000  # MLflow's limit for the value of an experiment's tag


def state(tag: dict[str, str]) -> dict[str, Any]:
    (value,) = tag.values()
    assert len(value) < TAG_LENGTH
    found: dict[str, Any] = json.loads(value)
    return found


def sections(view: dict[str, Any]) -> dict[str, bool]:
    return {section["name"]: section["display"] for section in view["compareRunSections"]}


@pytest.mark.parametrize("study", FOLDED)
def test_charts_begin_with_the_losses_and_all_else_is_folded(study: str) -> None:
    for view in (state(list_of_runs(study)), state(runs_by_arm(study, "sweep.0123456789ab"))):
        assert [chart["metricKey"] for chart in view["compareRunCharts"]] == ["train/loss", "val/loss"]
        assert [*sections(view)] == ["losses", *FOLDED[study]]
        assert [name for name, is_open in sections(view).items() if is_open] == ["losses"]


def test_the_folder_of_every_probe_of_pre_training_is_folded() -> None:
    kept_in_journal, a_page_of_its_own = {"activation_histograms"}, {"system"}
    folders = {folder for folder, _ in PROBES.values() if folder} - kept_in_journal - a_page_of_its_own
    assert folders <= {*FOLDED["pretrain"]}


def test_another_kind_of_run_keeps_mlflows_order_of_charts() -> None:
    assert "compareRunSections" not in state(list_of_runs("evaluate"))


def test_the_list_shows_a_sweeps_numbers_first_and_a_sweep_its_arms() -> None:
    assert state(list_of_runs("pretrain"))["selectedColumns"][0] == "tags.`result`"
    view = state(runs_by_arm("pretrain", "sweep.0123456789ab"))
    assert view["groupBy"]["groupByKeys"][0]["groupByData"] == "sweep.0123456789ab"
    assert view["searchFilter"] == "tags.`sweep.0123456789ab` LIKE '%'"
    assert view["useGroupedValuesInCharts"] is False  # a chart of means would not have the arms' colours


@pytest.mark.integration
def test_an_experiment_gets_a_view_and_a_link_unless_it_has_them(uri: str) -> None:
    client = connect(uri)
    older = client.create_experiment("older", tags={NOTE: "mine"})
    assert get_experiment(client, "older", "pretrain") == older
    new = get_experiment(client, "new", "pretrain")
    assert get_experiment(client, "new", "evaluate") == new
    view = list_of_runs("pretrain")
    tags = {name: client.get_experiment_by_name(name).tags for name in ("older", "new")}
    assert tags["older"].items() >= (view | {NOTE: "mine"}).items()
    assert tags["new"].items() >= view.items()
    assert tags["new"][NOTE] == (
        f"[Its sweeps and runs](#/experiments/{new}/runs?workflowType=machine_learning&viewStateShareKey=runs)"
    )
