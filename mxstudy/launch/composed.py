"""The job that the command line hands to a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mxstudy.reader import ConfigError


@dataclass(frozen=True)
class Composed:
    """One job as Hydra composed it; `values` is its config as plain data, or the error that prevented one.

    `notes`: sentences for the user on the parts of the command that a rehearsal has changed. `undoes`: the overrides
    that set a setting of the precision back to its default, from a value of the experiment or the sweep.
    """

    overrides: tuple[str, ...]
    choices: dict[str, str]
    values: dict[str, Any] | ConfigError
    notes: tuple[str, ...] = ()
    undoes: frozenset[str] = frozenset()
