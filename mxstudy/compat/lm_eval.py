"""lm-eval: a task that supplies its own questions. Checked with lm_eval 0.4.13."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig


class NamedTask(Task):
    """A task without a YAML file, to be subclassed; results list it under `name`.

    Why: lm-eval 0.4.13 takes the whole config for the name of the task, so the config is set after the constructor. Its
    own `build_all_requests` draws a progress bar, and caches requests by the task's name only; ours stores what the
    subclass's `all_requests` returns where `evaluate` looks for it.
    """

    def __init__(self, name: str, output_type: str) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns that our tasks generate nothing
        super().__init__(config=None)
        self._config = TaskConfig(task=name, output_type=output_type, num_fewshot=0)

    def all_requests(self, rank: int, world_size: int) -> Iterable[Instance]:
        """Return the requests for this rank's share of the documents."""
        raise NotImplementedError

    def build_all_requests(self, *, rank: int = 0, world_size: int = 1, **_: Any) -> None:
        """Store all requests; lm-eval calls this."""
        self._instances = list(self.all_requests(rank, world_size))
