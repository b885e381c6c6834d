"""Add to a blend those of its corpora that are choices of the group data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from mxstudy.help.group_choices import visible
from mxstudy.reader import ConfigError, key_in, suggest

ADDED = "+data.corpora."  # how an override of a blend's corpus begins


def corpora_by_name(loader: ConfigLoader, master: DictConfig, config: DictConfig) -> list[str]:
    """Return the overrides that add to a blend those of its corpora that are choices of the group data.

    A corpus that `data.corpora` describes, with its kind, needs none. Raises ConfigError for an unknown name.
    """
    data: Any = OmegaConf.to_container(config).get("data")  # type: ignore[union-attr]
    phases, corpora = (data.get(key) for key in ("phases", "corpora")) if isinstance(data, dict) else (None, None)
    if not isinstance(phases, list) or not isinstance(corpora, dict):
        return []
    described = {name for name, one in corpora.items() if isinstance(one, dict) and "kind" in one}
    choices = visible(loader.get_group_options("data", results_filter=None))
    found: dict[str, None] = {}
    for number, phase in enumerate(phases):
        weights = phase.get("weights") if isinstance(phase, dict) else None
        for name in weights if isinstance(weights, dict) else ():
            if name not in described and name not in choices:
                known = suggest(name, [*sorted(described), *without_blends(loader, master, choices)])
                raise ConfigError(f"{key_in(f'data.phases[{number}].weights', name)}: no such corpus; {known}")
            found |= {} if name in described else {f"+data@data.corpora.{name}={name}": None}
    return list(found)


def without_blends(loader: ConfigLoader, master: DictConfig, choices: Sequence[str]) -> list[str]:
    """Return the choices of the group data that are a corpus; a blend can have only these."""
    found = loader.load_sweep_config(master, [f"+data@choices.{name}={name}" for name in choices]).choices
    return [name for name in choices if found[name].kind != "blend"]
