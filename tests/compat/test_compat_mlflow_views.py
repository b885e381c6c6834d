"""MLflow's pages read the keys that mxstudy.compat.mlflow_views writes, and have the sections that it names."""

from __future__ import annotations

import json

import pytest
from mlflow_pages import pages

from mxstudy.compat import mlflow_views as views

STATES = {
    "columns": views.with_columns(["tags.`norm`"], {views.RUN_NAME: 320}),
    "charts": views.with_charts("losses", ["val/loss"], ["train"]),
    "groups": views.with_groups("tags.x = 'y'", "metrics.`val/loss`", "arm"),
}
CARD, SECTION = STATES["charts"]["compareRunCharts"][0], STATES["charts"]["compareRunSections"][0]
WORDS = {"mlflow.sharedViewState", "viewStateShareKey", "SHOW_ALL", "LINE", "average", "groupByData", "groupByKeys"}
KEYS = {key for state in (*STATES.values(), CARD, SECTION) for key in state}


@pytest.mark.integration
@pytest.mark.parametrize("word", sorted(WORDS | KEYS | {views.SYSTEM, "aggregateFunction", "Run Name"}))
def test_the_pages_read_the_state_of_a_view(word: str) -> None:
    assert word in pages()


def test_a_view_is_a_tag_of_the_experiment() -> None:
    tag = views.shared_view("mine", STATES["groups"])
    assert {key: json.loads(value) for key, value in tag.items()} == {"mlflow.sharedViewState.mine": STATES["groups"]}


def test_the_first_section_is_open_with_its_charts_and_the_others_are_folded() -> None:
    sections = STATES["charts"]["compareRunSections"]
    assert [(section["name"], section["display"]) for section in sections] == [("losses", True), ("train", False)]
    assert (CARD["metricKey"], CARD["metricSectionId"]) == ("val/loss", SECTION["uuid"])
