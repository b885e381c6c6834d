"""Check what a composed config has chosen of the config groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from mxstudy.cli.registered import BASES
from mxstudy.compat.hydra import files_of
from mxstudy.config import STUDIES
from mxstudy.explain import AS_TRAINED, WHOLE
from mxstudy.help.group_choices import groups, visible
from mxstudy.help.meanings import classes
from mxstudy.reader import ConfigError, suggest, type_hints


def check_baseline(baseline: Any, choices_of: Callable[[str], list[str]]) -> None:
    """Raise ConfigError unless the baseline names choices of groups; a value of another kind is refused later."""
    chosen: Any = OmegaConf.to_container(baseline) if isinstance(baseline, DictConfig) else {}
    for group, choice in chosen.items():
        there = choices_of(str(group))
        if not there:
            raise ConfigError(f"baseline.{group}: no such group; {suggest(str(group), groups())}")
        if choice not in there:
            raise ConfigError(f"baseline.{group}: no such choice; {suggest(str(choice), there)}")


def check_kind_of_run(loader: ConfigLoader, study: str, chosen: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError for a choice of another kind of run, such as optimizer=sgd, a student's, for a decoder."""
    for group, choice in chosen:
        own = starts_from(loader, group, choice)
        if not own or own & taken_by(study, group):
            continue
        kinds = " or ".join(f"study={kind}" for kind in STUDIES if own & taken_by(kind, group))
        every = visible(loader.get_group_options(group))
        fit = [one for one in every if starts_from(loader, group, one) & taken_by(study, group)]
        advice = f"choose from {', '.join(fit)}" if fit else "leave it out"
        raise ConfigError(f"{group}={choice}: is for {kinds}, and this run is study={study}; {advice}")


def starts_from(loader: ConfigLoader, group: str, choice: str) -> set[type]:
    """Return the classes of the schema whose defaults a choice starts from; none if its file names no base."""
    bases = {f"base_{name}": cls for name, cls in BASES.get(group, {}).items()}
    return {bases[name] for name in files_of(loader, group, choice) if name in bases} if bases else set()


def taken_by(study: str, group: str) -> set[type]:
    """Return the classes that a kind of run takes in a group."""
    run: type = STUDIES[study]
    return set(classes(type_hints(run).get(group)))


def partly_as_trained(values: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield group and key of each value that is set in a group whose choice is as_trained.

    Such a group comes from the checkpoint as a whole. A group that also has its key of WHOLE was replaced in full, and
    is allowed.
    """
    for group, whole in WHOLE.items():
        added = values.get(group)
        if choices.get(group) == AS_TRAINED and isinstance(added, dict) and whole not in added:
            yield from ((group, f"{group}.{key}") for key in added)
