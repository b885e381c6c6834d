"""How Hydra hands a sweep to mxstudy. Hydra imports this file at every start, so it imports mxstudy only when used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class GridSweeper(BasicSweeper):
    """Hydra's grid, which would compose every job twice and write multirun.yaml; and `cases`: what varies together."""

    def __init__(self, params: dict[str, Any], cases: list[dict[str, Any]]) -> None:
        super().__init__(max_batch_size=None, params=params)
        self.cases = cases or [{}]

    def sweep(self, arguments: list[str]) -> Any:
        assert self.hydra_context is not None
        if not isinstance(self.launcher, StudyLauncher):
            raise HydraException("hydra/launcher: this one does not run studies; see conf/hydra/launcher")
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        jobs: list[list[str]] = []
        small = _rehearsed(arguments)
        for case in self.cases:
            values = {key: value for key, value in {**self.params, **case}.items() if key not in small}
            axes = [f"{key}={_choices(value)}" for key, value in values.items()]
            # of two lines with the same key the later wins: the command line beats the file
            (batch,) = self.split_arguments(parser.parse_overrides(axes + arguments), None)
            jobs += batch
        return self.launcher.launch(jobs, initial_job_idx=0)


class StudyLauncher(Launcher):
    """Hands the jobs to mxstudy, with the settings of hydra.launcher."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        if not config.hydra.sweeper._target_.endswith(GridSweeper.__name__):
            raise HydraException("hydra/sweeper: only grid runs studies")
        self.loader, self.master = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        from mxstudy.cli import launch_jobs
        from mxstudy.config import read_launcher

        launch_jobs(self.loader, self.master, job_overrides, read_launcher(self.settings))
        return []  # a sweeper would read a return value of each entry


def _rehearsed(arguments: Sequence[str]) -> set[str]:
    """The keys that a debug choice sets: a sweep's sizes and steps give way to it, as an experiment's do."""
    from mxstudy.cli import debug_values
    from mxstudy.reader import flatten

    choice = next((value for key, _, value in (a.partition("=") for a in arguments) if key == "+debug"), None)
    return set(flatten(debug_values(choice, None)))


def _choices(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ",".join("null" if v is None else str(v) for v in values)
