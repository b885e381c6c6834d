"""Hydra: features for which it has no public interface. Checked with hydra-core 1.3.8.

Hydra imports this file when it starts, through hydra_plugins, so it imports only what Hydra has imported already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ConfigDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

# Patterns of Hydra's messages with the group or the file they name, for which its errors have no field.
NOTHING_TO_OVERRIDE = r"Could not override '([^'@]+)"
OVERRIDES_BELOW_ITSELF = r"^In '((experiment|sweep)/[^']+)': Could not override '[^'@]+@\2\."
CHOSEN_ALREADY = r"Multiple values for ([^.]+)\."
NAMED_IN = r"^In '([^']+)': Could not "

MAP: Any = defaults_list._create_interpolation_map  # Hydra's own


def compose_once() -> None:
    """Make Hydra, started with --multirun, compose the config once instead of twice.

    Why: it composes the whole config beforehand to read hydra.mode from it, which --multirun overrides anyway. Hydra
    takes None for "not in the config".
    """
    from hydra._internal.hydra import Hydra

    Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]


def map_choices_if_asked() -> None:
    """Make Hydra list the choices so far only for a defaults list with a reference to one of them.

    Why: it makes the list, which takes a fifth of a composition, for each file, and reads it for references alone.
    """
    defaults_list._create_interpolation_map = _map_of_choices  # type: ignore[assignment]


def _map_of_choices(overrides: Any, defaults: Sequence[Any], self_added: bool) -> DictConfig:
    is_asked = any(default.is_interpolation() for default in defaults)
    return cast(DictConfig, MAP(overrides, defaults, self_added)) if is_asked else DictConfig({})


def product(loader: ConfigLoader, lines: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every job of the grid KEY=A,B,...; if a key has two lines, the later one wins.

    Why: the sweeper that does this is internal, and it also composes every job twice and writes multirun.yaml. It is
    imported inside, because Hydra runs its file a second time when it looks for plugins.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(lines))
    (batch,) = BasicSweeper.split_arguments(overrides, None)
    return batch


class Override(NamedTuple):
    """A line of a job's overrides as Hydra reads it.

    `changes`: the line is KEY=VALUE, without + or ~, and not about Hydra's own config; else `value` is None.
    """

    line: str
    key: str
    changes: bool
    value: Any


def parse(loader: ConfigLoader, line: str) -> Override:
    """Return an override as Hydra reads it. Why: its parser is not part of its documented interface."""
    parsed = OverridesParser.create(config_loader=loader).parse_override(line)
    changes = parsed.type is OverrideType.CHANGE and not parsed.is_hydra_override()
    return Override(str(parsed.input_line), parsed.key_or_group, changes, parsed.value() if changes else None)


def text_value(line: str) -> str | None:
    """Return the value of an override if it is one text, else None. Raises HydraException."""
    value = OverridesParser.create(config_loader=cast(ConfigLoader, None)).parse_override(line).value()
    return value if isinstance(value, str) else None


def first_value(line: str) -> tuple[str, Any]:
    """Return key and value of an override, or of a sweep the first value. Raises HydraException or ValueError.

    Why: Hydra finds an empty or endless sweep only when it composes, and then names neither key nor line.
    """
    parsed = OverridesParser.create(config_loader=cast(ConfigLoader, None)).parse_override(line)
    if not parsed.is_sweep_override() or isinstance(parsed.value(), Glob):  # a pattern is compared with files later
        return parsed.key_or_group, "" if isinstance(parsed.value(), Glob) else parsed.value()
    values = parsed.sweep_iterator()
    return parsed.key_or_group, next(iter(values))


def read_files_once() -> None:
    """Make Hydra read each config file of a command once, instead of once for the command and once per job.

    Why: each composition copies the whole repository and reads and parses some forty files again, which takes most of
    the time of a sweep of hundreds of jobs.
    """
    from hydra._internal import hydra

    hydra.ConfigLoaderImpl = LoaderWithMemory  # type: ignore[misc]


class AllOf(NamedTuple):
    """All files of a config, to be merged as one. `config_path` stands in Hydra's messages."""

    defaults: list[ResultDefault]
    config_path: str | None


class LoaderWithMemory(ConfigLoaderImpl):
    """Hydra's loader of configs, which keeps the files that it has read, and merges a config's files in one call.

    Why: after each call OmegaConf sets the parent of every value anew, which takes a third of a composition.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = cast(ConfigRepository, Remembered(self.repository))

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        whole: Any = AllOf(defaults, defaults[-1].config_path)
        try:
            return super()._compose_config_from_defaults_list([whole], repo)
        except OmegaConfBaseException:  # Hydra names the file that cannot be merged; the copies in `repo` have changed
            return super()._compose_config_from_defaults_list(defaults, CachingConfigRepository(self.repository))

    def _load_single_config(self, default: ResultDefault | AllOf, repo: IConfigRepository) -> ConfigResult:
        if not isinstance(default, AllOf):
            return super()._load_single_config(default, repo)
        first, *others = [self._load_single_config(one, repo) for one in default.defaults]
        whole = OmegaConf.create()
        with flag_override(whole, "no_deepcopy_set_nodes", True):
            whole.merge_with(first.config, *(one.config for one in others))
        return replace(first, config=whole)


class UnreadableFile(HydraException):
    """Raised for a config file that cannot be read, with its path; the error's cause says why."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise UnreadableFile for any error of the block, which does nothing but read that config file.

    Why: Hydra and OmegaConf pass on whatever YAML, Unicode or their own checks raise, mostly without the file.
    """
    try:
        yield
    except Exception as error:
        raise UnreadableFile(str(file)) from error


class Remembered:
    """Hydra's repository of configs, which is never copied and keeps every file in memory once it was read."""

    def __init__(self, repository: Any) -> None:
        self.repository = repository
        self.loaded: dict[str, bytes] = {}  # pickled, because copy.deepcopy takes five times as long as unpickling
        self.names: dict[str, str] = {}  # {file: what its defaults list holds}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.repository, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return self

    def initialize_sources(self, config_search_path: Any) -> None:
        """Forget the files that were read, because the search path may have changed."""
        self.loaded.clear()
        self.names.clear()
        self.repository.initialize_sources(config_search_path)

    def load_config(self, config_path: str) -> Any:
        """Return a copy of the file's config, because composing changes it."""
        if config_path not in self.loaded:
            with reading(self.file_of(config_path)):
                found = self.repository.load_config(config_path=config_path)
                check_content(found)
            self.loaded[config_path] = pickle.dumps(found)
            self.names[config_path] = repr([vars(default) for default in (found and found.defaults_list) or ()])
        return pickle.loads(self.loaded[config_path])

    def file_of(self, config_path: str) -> Path:
        """Return the file of a config; where there is none, its path among the groups."""
        folders = (source.path for source in self.repository.get_sources() if source.is_config(config_path))
        return Path(next(folders, ""), f"{config_path.removesuffix('.yaml')}.yaml")


def check_content(found: ConfigResult | None) -> None:
    """Raise ValueError for a config that Hydra reads and then ignores: a list, or an empty file."""
    if found is not None and not OmegaConf.is_dict(found.config):
        raise ValueError("it holds a list, not a mapping")
    if found is not None and found.path.startswith("file:") and not found.config and not found.defaults_list:
        raise ValueError("it is empty")


def stands_alone(loader: ConfigLoader, group: str, choice: str) -> bool:
    """Return whether a choice puts values into its group's own section alone, and decides no other group's choice.

    So if several groups have such choices, each group's section is the same, whatever the other groups choose.

    Why: Hydra composes each combination of choices anew. It merges the files of a defaults list in order, so a section
    depends only on the files that put values into it. For a choice that stands alone, these are a file without a
    package and the files beside it that its defaults list names, without other groups or overrides. A choice does not
    stand alone if such a list has a name that refers to another choice. With a loader of another class, none may.
    """
    files: Any = getattr(loader, "repository", None)
    if not isinstance(files, Remembered) or any("${" in names for names in files.names.values()):
        return False
    found = files.load_config(f"{group}/{choice}") if "/" not in group else None
    if found is None or found.header.get("package"):
        return False
    for default in found.defaults_list or ():
        if not isinstance(default, ConfigDefault) or default.package is not None or "/" in str(default.path):
            return False
        if not default.is_self() and not stands_alone(loader, group, str(default.path)):
            return False
    return True


def files_of(loader: ConfigLoader, group: str, choice: str) -> Iterator[str]:
    """Yield the files that a choice is made of: itself, and those of its group that its defaults list names, and so on.

    Why: Hydra merges them, and keeps no record of which they were.
    """
    yield choice
    files: Any = getattr(loader, "repository", None)
    found = files.load_config(f"{group}/{choice}") if isinstance(files, Remembered) else None
    for default in (found and found.defaults_list) or ():
        if isinstance(default, ConfigDefault) and not default.is_self() and "/" not in str(default.path):
            yield from files_of(loader, group, str(default.path))


class Family:
    """Jobs that differ in values and in choices that stand alone: composed once, and once more for each other choice.

    `compose` returns a job's config and choices, or raises what Hydra does. `moved`: sections that values may change.
    """

    def __init__(
        self, compose: Callable[[Sequence[str]], tuple[DictConfig, dict[str, str]]], job: Sequence[str], moved: Set[str]
    ) -> None:
        self.compose, self.job, self.moved = compose, job, moved
        self.config, self.choices = compose(job)
        self.same = unmoved(self.config, moved)
        self.others: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}  # a choice's section, and what of it stays

    def composed(
        self, job: Sequence[str], chosen: Mapping[str, str]
    ) -> tuple[DictConfig, dict[str, str], dict[str, Any]]:
        """Return a job's config, its choices, and as plain data the sections that its values cannot change.

        The config is the family's own: the caller sets the job's values on it, and the next job replaces them.
        `chosen`: the choices that stand alone, by group.
        """
        for group, choice in chosen.items():
            if choice != (before := self.choices[group]):
                own = {key: value for key, value in self.same.items() if key == group}
                self.others.setdefault((group, before), (self.config[group], own))
                try:
                    section, own = self.section(group, choice)
                except (HydraException, OmegaConfBaseException):
                    return *self.compose(job), {}  # says what is wrong with this job
                with open_dict(self.config):
                    self.config[group] = section
                self.choices = self.choices | {group: choice}
                self.same = {key: value for key, value in self.same.items() if key != group} | own
        return self.config, self.choices, self.same

    def section(self, group: str, choice: str) -> tuple[Any, dict[str, Any]]:
        """Return a group's section for a choice, and {group: it as plain data}, or {} if values may change it."""
        if (group, choice) not in self.others:
            words = [f"{group}={choice}" if line.partition("=")[0] == group else line for line in self.job]
            config, _ = self.compose(words)
            own = {key: value for key, value in unmoved(config, self.moved).items() if key == group}
            self.others[group, choice] = config[group], own
        return self.others[group, choice]


def unmoved(config: DictConfig, moved: Set[str]) -> dict[str, Any]:
    """Return as plain data the sections of a config that are not moved and have no references to other values."""
    values: Any = OmegaConf.to_container(config)
    return {key: value for key, value in values.items() if key not in moved and "${" not in repr(value)}
