"""What the command line hands to a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mxstudy.reader import ConfigError


@dataclass(frozen=True)
class Composed:
    """One job as Hydra composed it: plain data, or why it could not be composed."""

    overrides: tuple[str, ...]
    choices: dict[str, str]
    values: dict[str, Any] | ConfigError
