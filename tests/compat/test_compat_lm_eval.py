"""lm-eval reads what mxstudy.compat.lm_eval sets."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from mxstudy.compat.lm_eval import NamedTask

pytestmark = pytest.mark.integration


class Twice(NamedTask):
    """A task with two requests, whatever the documents."""

    OUTPUT_TYPE = "loglikelihood"

    def __init__(self) -> None:
        super().__init__("twice", self.OUTPUT_TYPE)

    def download(self, *_: object, **__: object) -> None:
        """Have no documents."""

    def all_requests(self, rank: int, world_size: int) -> Iterator[Instance]:
        for number in range(2):
            yield Instance("loglikelihood", {}, ("a", "b"), 0, metadata=(self.config.task, number, world_size + rank))


Twice.__abstractmethods__ = frozenset()  # nothing here asks for documents


def test_the_name_is_that_of_the_config() -> None:
    task = Twice()
    assert (task.config.task, task.config.num_fewshot) == ("twice", 0)
    assert task.OUTPUT_TYPE == task.config.output_type == "loglikelihood"


def test_requests_are_found_where_lm_eval_looks() -> None:
    task = Twice()
    task.build_all_requests(limit=None, rank=1, world_size=2, cache_requests=False)
    assert [(request.task_name, request.doc_id, request.repeats) for request in task.instances] == [
        ("twice", 0, 3),
        ("twice", 1, 3),
    ]


def test_a_task_is_begun_with_a_whole_config_or_none() -> None:
    assert "config" in inspect.signature(Task.__init__).parameters
    assert {"rank", "world_size"} <= inspect.signature(Task.build_all_requests).parameters.keys()
