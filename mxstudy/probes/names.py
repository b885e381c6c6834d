"""The names of the probes, without the probes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mxstudy.config import Probes

DEFAULTS = Probes()


def probe_names(probes: Any = DEFAULTS) -> tuple[str, ...]:
    """Return the names of all fields of a config.Probes, but `spikes`: that looks at the steps, and not into them."""
    return tuple(field.name for field in fields(probes) if field.name != "spikes")
