"""MLflow: the state of a view of its list of runs, which a link with ?viewStateShareKey=NAME shows.

Why: MLflow's pages read such a state from a tag of the experiment, and there is no interface that makes one. A link
that also has a search or an order in it shows no view, so a view has its own. Checked with mlflow 3.17.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

State = dict[str, Any]

RUN_NAME = "attributes.`Run Name`"
SYSTEM = "System metrics"  # the section of the metrics under system/
CARDS_A_ROW = 2  # MLflow's three cut the names of metrics off


def shared_view(name: str, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the tag of an experiment that stores a view of its runs."""
    return {f"mlflow.sharedViewState.{name}": json.dumps(state, separators=(",", ":"))}


def address_of_view(experiment_id: str, name: str, charts: bool = False) -> str:
    """Return the address of a view: a list of runs, or with their charts beside it."""
    query = {"workflowType": "machine_learning"} | ({"compareRunsMode": "CHART"} if charts else {})
    return f"#/experiments/{experiment_id}/runs?{urlencode(query | {'viewStateShareKey': name})}"


def with_columns(names: Sequence[str], widths: Mapping[str, int]) -> State:
    """Return the state that shows these columns after the run's name, in order. `widths`: pixels of some of them."""
    return {"selectedColumns": list(names), "columnOrder": [RUN_NAME, *names], "columnWidths": dict(widths)}


def with_charts(first: str, metrics: Sequence[str], folded: Sequence[str]) -> State:
    """Return the state whose charts begin with an open section of these metrics, before the folded sections.

    MLflow adds all other metrics to the section of their folder, and sections that are not named here behind these.
    """
    lines = [
        {"type": "LINE", "uuid": metric, "metricSectionId": first, "metricKey": metric, "displayName": metric}
        | {"isGenerated": True, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}
        for metric in metrics
    ]
    sections = [
        {"uuid": name, "name": name, "display": name == first, "columns": CARDS_A_ROW} for name in (first, *folded)
    ]
    shown = {"runsHiddenMode": "SHOW_ALL", "isAccordionReordered": True}
    return shown | {"compareRunCharts": lines, "compareRunSections": sections}


def with_groups(search: str, order_by: str, tag: str) -> State:
    """Return the state that shows the runs that a search finds, those with one value of a tag as a group.

    A group shows the means of its runs. The charts draw every run, for a group has no colour that could be chosen.
    """
    by_tag = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag}]}
    found = {"searchFilter": search, "orderByKey": order_by, "orderByAsc": True}
    return found | {"groupBy": by_tag, "useGroupedValuesInCharts": False}
