"""Hydra: what it has no public way for. Checked with hydra-core 1.3.8.

Hydra's start imports this file, through hydra_plugins: it imports nothing that Hydra has not imported by then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser

# What Hydra says, with the group that it says it about: its errors have no field for that.
NOTHING_TO_OVERRIDE = r"Could not override '([^'@]+)"
CHOSEN_ALREADY = r"Multiple values for ([^.]+)\."


def product(loader: ConfigLoader, lines: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every job, from lines KEY=A,B,... of which the later wins where two have one key.

    Why: the sweeper that does this is internal, and what else it does is to compose every job twice and to write
    multirun.yaml. It is imported here, because Hydra runs its file a second time when it looks for plugins.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(lines))
    (batch,) = BasicSweeper.split_arguments(overrides, None)
    return batch


def read_files_once(loader: ConfigLoader) -> None:
    """Have Hydra's loader read each file of a config once, instead of once a job.

    Why: for each job it copies its whole repository and reads and parses some thirty files anew, which takes most of
    the time of a sweep of hundreds of jobs. A loader of another class stays as it is.
    """
    if isinstance(loader, ConfigLoaderImpl) and not isinstance(loader.repository, Remembered):
        loader.repository = cast(ConfigRepository, Remembered(loader.repository))


class Remembered:
    """Hydra's repository of configs, without the copies, and with every file in memory once it was read."""

    def __init__(self, repository: Any) -> None:
        self.repository = repository
        self.loaded: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.repository, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return self

    def initialize_sources(self, config_search_path: Any) -> None:
        """Forget what was read: the files may be elsewhere now."""
        self.loaded.clear()
        self.repository.initialize_sources(config_search_path)

    def load_config(self, config_path: str) -> Any:
        """Return a copy of what the file holds, because composing changes it."""
        if config_path not in self.loaded:
            self.loaded[config_path] = self.repository.load_config(config_path=config_path)
        return copy.deepcopy(self.loaded[config_path])
