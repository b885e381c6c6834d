"""List the names of the probes, without importing them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mxstudy.config import Probes

DEFAULTS = Probes()


def probe_names(probes: Any = DEFAULTS) -> tuple[str, ...]:
    """Return the names of all fields of a config.Probes except `spikes`, which watches losses and is not a probe."""
    return tuple(field.name for field in fields(probes) if field.name != "spikes")
