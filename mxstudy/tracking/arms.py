"""Sort runs into arms: runs whose configs agree except in seeds, whatever their names.

An arm has the shortest name that tells it from the others of its set, and a colour of its own. Both follow from configs
and the choices of config groups. The label of a run, the words its user typed, is only a record.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mxstudy.config.deciding import Value, deciding, defaults_of, kinds_in
from mxstudy.config.run import SEEDS
from mxstudy.reader import flatten, plain
from mxstudy.tracking.arm_colors import colors_of
from mxstudy.tracking.arm_names import Named, names_of, text_of
from mxstudy.tracking.folder import RunFolder

REPLICATES, BASELINE = "replicates.", "baseline."


@dataclass(frozen=True)
class Described:
    """The description of a run: its flat config, with or without defaults, and its choice of each config group."""

    config: Mapping[str, Any]
    choices: Mapping[str, str]

    @cached_property
    def replicates(self) -> frozenset[str]:
        """Return the keys in which runs of one arm may differ: seeds, and what the config's `replicates` names."""
        own = (str(value) for key, value in self.config.items() if key.startswith(REPLICATES) and value == value)
        return frozenset((*SEEDS, *own))

    @cached_property
    def values(self) -> dict[str, Value]:
        return deciding(self.config)

    @cached_property
    def parting(self) -> dict[str, Value]:
        """Return the values that part arms."""
        return {key: value for key, value in self.values.items() if key not in self.replicates}

    @cached_property
    def key(self) -> str:
        """Return the arm's identity, which does not change when a field is added to the schema later."""
        defaults = defaults_of(kinds_in(self.config))
        own = sorted((k, v) for k, v in self.parting.items() if v != defaults.get(k) or k.split(".")[-1] == "kind")
        return hashlib.sha256(repr(own).encode()).hexdigest()

    @property
    def unit(self) -> tuple[tuple[str, str], ...]:
        """Return its seeds and other replicates, as (key, value as text), by which runs of two arms are paired."""
        return tuple((key, text_of(self.values[key])) for key in sorted(self.replicates & self.values.keys()))

    @cached_property
    def is_baseline(self) -> bool:
        """Return whether it made the choices of the config's `baseline`."""
        return bool(self.baseline) and all(self.choices.get(group) == one for group, one in self.baseline.items())

    @cached_property
    def baseline(self) -> dict[str, str]:
        """Return the baseline's choice of each group that the config names."""
        found = {k.removeprefix(BASELINE): v for k, v in self.config.items() if k.startswith(BASELINE)}
        return {group: choice for group, choice in found.items() if isinstance(choice, str)}

    def beside(self, groups: Iterable[str]) -> frozenset[tuple[str, Value]]:
        """Return the values that part arms, without those of these groups."""
        own = tuple(f"{group}." for group in groups)
        return frozenset((key, value) for key, value in self.parting.items() if not f"{key}.".startswith(own))


@dataclass(frozen=True)
class Arm:
    """`partner`: the name of the arm that it is compared with, its own for a baseline; None if there is none."""

    name: str
    color: str
    partner: str | None


def describe(config: Any, choices: Mapping[str, str]) -> Described:
    """Return the description of a run from its config, a frozen dataclass."""
    return Described(flatten(plain(config)), choices)


def described(folder: RunFolder) -> Described:
    """Return the description of a run, as its membership asks for it; the config may be of an earlier schema."""
    values = folder.config_values()
    asked = folder.membership()
    if asked.baseline is not None:
        values["baseline"] = asked.baseline
    return Described(flatten(values), asked.choices)


def arms_of(runs: Sequence[Described]) -> list[Arm]:
    """Return the arm of each run, named and coloured among these runs.

    An arm keeps its colour when runs of other arms are added at the end. If no run made the choices of the config's
    `baseline`, all arms are compared with the first, whatever the differences.
    """
    members: dict[str, list[Described]] = {}
    for run in runs:
        members.setdefault(run.key, []).append(run)
    names = names_of([Named(own[0].parting, own[0].config, made_by(own)) for own in members.values()])
    named = dict(zip(members, names, strict=True))
    named_by = [key for key, own in members.items() if any(run.is_baseline for run in own)]
    baselines = named_by or [*members][:1]
    firsts = {key: own[0] for key, own in members.items()}
    colors = colors_of({key: run.parting for key, run in firsts.items()}, first=baselines)
    partners = partners_of(firsts, named_by) if named_by else dict.fromkeys(firsts, baselines[0])
    arms = {key: Arm(named[key], colors[key], named.get(partners[key] or "")) for key in firsts}
    return [arms[run.key] for run in runs]


def partners_of(arms: Mapping[str, Described], baselines: Sequence[str]) -> dict[str, str | None]:
    """Return for each arm the key of the baseline that it is compared with.

    It differs from the arm only in the groups of the config's `baseline`; it is None if there is no such baseline.
    """
    by_rest = functools.cache(lambda groups: {arms[key].beside(groups): key for key in reversed(baselines)})
    found = {key: by_rest(groups := tuple(run.baseline)).get(run.beside(groups)) for key, run in arms.items()}
    return found | {key: key for key in baselines}


def made_by(runs: Sequence[Described]) -> dict[str, list[str]]:
    """Return the choices of each group that these runs made."""
    groups = dict.fromkeys(group for run in runs for group in run.choices)
    return {group: list(dict.fromkeys(r.choices[group] for r in runs if group in r.choices)) for group in groups}


def run_names(runs: Sequence[Described], arms: Sequence[Arm]) -> list[str]:
    """Return the name of each run, given its arm: the arm's name, and those seeds that differ among these runs."""
    units = [dict(run.unit) for run in runs]
    varied = {key for key in set().union(*units) if len({unit.get(key) for unit in units}) > 1}
    if all(unit.get("data_seed") == unit.get("seed") for unit in units):
        varied.discard("data_seed")
    return [
        " ".join([arm.name, *(f"{key}={value}" for key, value in unit.items() if key in varied)])
        for arm, unit in zip(arms, units, strict=True)
    ]
