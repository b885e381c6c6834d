"""Provide the Hydra sweeper and launcher that hand the jobs of a sweep to mxstudy.

Hydra imports this file at every start, so slow imports are made where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from mxstudy.compat.hydra import product


class GridSweeper(Sweeper):
    """Build the grid of `params` as Hydra's own sweeper does, once for each of `cases`, whose values vary together."""

    def __init__(self, params: dict[str, Any], cases: list[dict[str, Any]]) -> None:
        self.params, self.cases = params, cases or [{}]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        if not isinstance(self.launcher, StudyLauncher):
            raise HydraException("hydra/launcher: this launcher does not run studies; see conf/hydra/launcher")
        jobs: list[list[str]] = []
        set_by_debug = _rehearsed(arguments)
        for case in _asked_for(self.cases, arguments):
            values = {key: value for key, value in {**self.params, **case}.items() if key not in set_by_debug}
            axes = [f"{key}={_choices(value)}" for key, value in values.items()]
            jobs += product(self.loader, axes + arguments)  # the command line comes last, so that it overrides the file
        if not jobs:
            raise HydraException(f"{' '.join(arguments)}: a pattern fits no choice, so there is no job")
        return self.launcher.launch(jobs, initial_job_idx=0)


class StudyLauncher(Launcher):
    """Launch the jobs with mxstudy, with the settings of hydra.launcher."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        if not config.hydra.sweeper._target_.endswith(GridSweeper.__name__):
            raise HydraException("hydra/sweeper: this sweeper does not run studies; choose grid")
        self.loader, self.master = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        from mxstudy.cli.through_hydra import launch_jobs
        from mxstudy.config import read_launcher

        launch_jobs(self.loader, self.master, job_overrides, read_launcher(self.settings))
        return []  # Hydra's sweepers would read the jobs' results from it; ours does not


def _rehearsed(arguments: Sequence[str]) -> set[str]:
    """Return the keys that the debug choice of the command line sets, which replace a sweep's values of these keys."""
    from mxstudy.cli.composing import debug_values
    from mxstudy.reader import flatten

    choice = next((value for key, _, value in (a.partition("=") for a in arguments) if key == "+debug"), None)
    return set(flatten(debug_values(choice, None)))


def _asked_for(cases: Sequence[dict[str, Any]], arguments: Sequence[str]) -> Sequence[dict[str, Any]]:
    """Return the cases without those that make another choice than the command line does, where some case makes it.

    What belongs to one model, say, is not run with another one that has a case of its own.
    """
    for key, _, value in (argument.partition("=") for argument in arguments):
        asked, is_group = set(value.split(",")), "." not in key
        if is_group and any(key in case and _makes(case[key], asked) for case in cases):
            cases = [case for case in cases if key not in case or _makes(case[key], asked)]
    return cases


def _makes(values: Any, asked: set[str]) -> bool:
    return not asked.isdisjoint(_choices(values).split(","))


def _choices(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ",".join("null" if v is None else str(v) for v in values)
