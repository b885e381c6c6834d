"""Record the experiments and sweeps that a run belongs to: all that planned it, whether they trained it or not.

A run is stored once, in the folder of the experiment that came first. `memberships.json` in that folder has a row for
each experiment and sweep. Without this file, the run has one membership, which provenance.json describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxstudy.small_files import read_if_there, read_yaml

NAME = "memberships.json"
DELETE_IT = "delete it; the commands that asked for the run, run again, make it anew"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A record that an experiment, and perhaps a sweep of it, asked for a run.

    `label`: this run's values of what varies among the jobs of that sweep, or what its command changed if it was the
    only job. `choices`: the choice of each config group.
    `baseline`: the choices of the arm to compare the others with; None: those in the run's config.
    """

    experiment: str
    label: str | None
    overrides: tuple[str, ...] = ()
    choices: dict[str, str]
    baseline: dict[str, str] | None = None

    @property
    def sweep(self) -> str | None:
        return self.choices.get("sweep")

    @property
    def names(self) -> set[str]:
        """Return the names by which this membership's runs are found."""
        return {self.experiment} | ({self.sweep} if self.sweep else set())

    @property
    def in_config(self) -> dict[str, Any]:
        """Return the fields of a run's config that its sweep decides and its fingerprint ignores."""
        return {"experiment": self.experiment} | ({} if self.baseline is None else {"baseline": self.baseline})


def read_memberships(folder: Path, provenance: Callable[[], Mapping[str, Any]]) -> list[Membership]:
    """Return the memberships of a run, in the order in which they came."""
    found = read_if_there(tuple[Membership, ...], folder / NAME, DELETE_IT)
    if found:
        return list(found)
    about = provenance()
    choices = about.get("choices", {})
    return [
        Membership(
            experiment=choices.get("experiment") or experiment_of(folder),
            label=about.get("label"),
            overrides=tuple(about.get("overrides", ())),
            choices=choices,
            baseline=about.get("baseline"),
        )
    ]


def experiment_of(folder: Path) -> str:
    """Return the experiment that a run's config names, or else that of its folder."""
    config = folder / "config.yaml"
    values = read_yaml(config, "move the folder away") if config.exists() else {}
    return str(values.get("experiment", folder.parent.name))


def text_of(memberships: Iterable[Membership]) -> str:
    return json.dumps([asdict(each) for each in memberships], indent=1)


def joined_by(memberships: Iterable[Membership], new: Iterable[Membership]) -> list[Membership]:
    """Return all memberships, one for each experiment and sweep: a new one replaces an earlier one of the same sweep.

    If the new one's label has fewer words, the earlier one stays: it tells the run from more others.
    """
    found: dict[tuple[str, str | None], Membership] = {}
    for each in (*memberships, *new):
        before = found.setdefault((each.experiment, each.sweep), each)
        if words(each) >= words(before):
            found[each.experiment, each.sweep] = each
    return list(found.values())


def words(membership: Membership) -> int:
    return len((membership.label or "").split())


def membership_in(memberships: Iterable[Membership], name: str) -> Membership | None:
    """Return the membership in the sweep or experiment of that name, or None.

    A sweep of that name takes precedence over an experiment, and that over another sweep of it; the last of several
    counts.
    """
    found = [each for each in memberships if name in each.names]
    return max(reversed(found), key=lambda each: (each.sweep == name, each.sweep is None), default=None)
