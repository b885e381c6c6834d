"""Check what a composed config has chosen of the config groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mxstudy.explain import AS_TRAINED, WHOLE
from mxstudy.help.group_choices import groups
from mxstudy.reader import ConfigError, suggest


def check_baseline(baseline: Any, choices_of: Callable[[str], list[str]]) -> None:
    """Raise ConfigError unless the baseline names choices of groups; a value of another kind is refused later."""
    chosen: Any = OmegaConf.to_container(baseline) if isinstance(baseline, DictConfig) else {}
    for group, choice in chosen.items():
        there = choices_of(str(group))
        if not there:
            raise ConfigError(f"baseline.{group}: no such group; {suggest(str(group), groups())}")
        if choice not in there:
            raise ConfigError(f"baseline.{group}: no such choice; {suggest(str(choice), there)}")


def partly_as_trained(values: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield group and key of each value that is set in a group whose choice is as_trained.

    Such a group comes from the checkpoint as a whole. A group that also has its key of WHOLE was replaced in full, and
    is allowed.
    """
    for group, whole in WHOLE.items():
        added = values.get(group)
        if choices.get(group) == AS_TRAINED and isinstance(added, dict) and whole not in added:
            yield from ((group, f"{group}.{key}") for key in added)
